"""Faults on purpose, under load: does the service keep its second promise?"""
