# Everything runs from .venv, which the first target that needs it makes.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2

.PHONY: demo test test-all check bench clean

.venv/installed: setup.py
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

demo: .venv/installed
	$(BIN)/longctx demo

test: .venv/installed-test
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

test-all: .venv/installed-test
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m 'slow or not slow'

check: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed-test
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.end_to_end

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build *.egg-info
