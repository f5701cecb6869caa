"""The model that tests serve."""

from workers.measuring.tiny import make_tiny_model as make_tiny_model
