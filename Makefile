# Everything a clone is used for. `make` alone lists the targets.

PYTHON ?= python3
PORT ?= 8000
HOST ?= 127.0.0.1
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/installed

.DEFAULT_GOAL := help
.PHONY: help serve test test-all lint format bench bench-methods bench-controller bench-remote bench-scaling chaos clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 24
	@echo
	@echo "  for example: make serve PORT=8001 ARGS=\"max_draft=4\"   make test ARGS=\"-k tree\""

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Draftree needs Python 3.11 or newer: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	@echo "Installing into .venv; this is done once and takes a few minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev,train]'
	@touch $@

# Ray's own choice for a Ray that it starts itself, but said aloud it comes without a warning.
serve: export RAY_AUTH_MODE ?= token
serve: $(INSTALLED)  ## serve the default model, or ARGS="model=... max_draft=...", on PORT
	@$(BIN)/python -m deployments.launch --host $(HOST) --port $(PORT) $(ARGS)

test: $(INSTALLED)  ## the fast tests
	$(BIN)/python -m pytest $(ARGS)

test-all: $(INSTALLED)  ## the slow tests too
	$(BIN)/python -m pytest -m "slow or not slow" $(ARGS)

lint: $(INSTALLED)  ## ruff and mypy, as CI runs them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## put imports and layout in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## the figures of the README: a table and one line of JSON; leave the machine alone meanwhile
	$(BIN)/python -m deployments.bench $(ARGS)

bench-methods: $(INSTALLED)  ## every method of guessing side by side: a table, a picture, one line of JSON
	$(BIN)/python -m workers.measuring.bench_methods $(ARGS)

bench-remote: $(INSTALLED)  ## the draft network here and in a process of its own: a table and one line of JSON
	$(BIN)/python -m workers.measuring.bench_remote $(ARGS)

bench-controller: $(INSTALLED)  ## the cost model under changing load and acceptance: tables, pictures, one line of JSON
	$(BIN)/python -m workers.measuring.controller $(ARGS)

bench-scaling: export RAY_AUTH_MODE ?= token
bench-scaling: $(INSTALLED)  ## whether verifiers follow the load: steps up and down, a table, one line of JSON
	$(BIN)/python -m deployments.bench_scaling $(ARGS)

# Nodes that are started one by one get no token of themselves, and this cluster lasts for minutes.
chaos: export RAY_AUTH_MODE ?= disabled
chaos: $(INSTALLED)  ## break a small cluster while requests run: a table, one line of JSON, status 1 for a broken promise
	$(BIN)/python -m deployments.chaos $(ARGS)

clean:  ## remove the environment and every cache of the tools
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
