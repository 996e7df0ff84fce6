PYTHON ?= $(shell command -v python3.11 || command -v python3)
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo tour test test-all lint bench bench-gpu docs clean
.SECONDARY:

help:
	@echo "make demo       train latent trees next to an LSTM, and draw them (FRESH=1: start again)"
	@echo "make tour       the queries, on one ambiguous sentence"
	@echo "make test       lint, type-check and test"
	@echo "make test-all   the same, with the slow tests"
	@echo "make bench      time against peers on the CPU (bench-gpu: on CUDA)"
	@echo "make docs       build the documentation into docs/_build/html"
	@echo "make clean      remove the environment and everything built"

# The environment: the package in editable mode, brought up to date when its requirements change.
# Extras are added to it by the targets that need them: $(VENV)/.extra-test and so on.
$(VENV)/.base: pyproject.toml constraints.txt
	@echo "Making the environment in $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

$(VENV)/.extra-%: $(VENV)/.base
	@echo "Installing the extra '$*'"
	$(PIP) -e ".[$*]"
	@touch $@

demo: $(VENV)/.extra-cli
	$(BIN)/python examples/listops_demo.py $(if $(FRESH),--fresh)

tour: $(VENV)/.extra-cli
	$(BIN)/python examples/tour.py

lint: $(VENV)/.extra-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n $(JOBS) -m "not slow and not gpu and not bench"

test-all: lint
	$(BIN)/pytest -n $(JOBS)

bench: $(VENV)/.extra-bench
	$(BIN)/python -m benchmarks

bench-gpu: $(VENV)/.extra-bench
	$(BIN)/python -m benchmarks --device cuda

docs: $(VENV)/.extra-docs
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf $(VENV) docs/_build docs/_static build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
