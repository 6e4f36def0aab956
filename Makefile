# Everything runs in .venv, which the first target makes. PYTHON chooses the interpreter.
PYTHON ?= python3
BIN := .venv/bin
# Test workers; the tests are bound by compilation, which uses one core each.
JOBS ?= 2

.PHONY: help demo test lint parity clean

help:
	@echo "make demo    set up .venv and generate text with the bundled model"
	@echo "make test    set up .venv, lint, type-check and test; needs no torch"
	@echo "make parity  compare with transformers, live (installs torch)"

demo: .venv/.installed
	$(BIN)/python -m flashmoe_jax.generate --prompt "Once upon a time" --max-new-tokens 100 --device-budget 25%

test: .venv/.installed-dev lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not parity"

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

parity: .venv/.installed-parity
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m parity

.venv/.installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/.installed-dev: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch .venv/.installed $@

.venv/.installed-parity: .venv/.installed-dev
	$(BIN)/python -m pip install --quiet --editable ".[dev,parity]"
	touch $@

.venv/bin/python:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
