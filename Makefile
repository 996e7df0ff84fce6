PYTHON ?= $(shell command -v python3.11 || command -v python3)
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo tour test test-all coverage mutation lint bench bench-gpu docs audit clean
.SECONDARY:

help:
	@echo "make demo       train latent trees next to an LSTM, and draw them (FRESH=1: start again)"
	@echo "make tour       the queries, on one ambiguous sentence"
	@echo "make test       lint, type-check and test"
	@echo "make test-all   the same, with the slow tests and those in a browser"
	@echo "make coverage   lines and branches that tests reach, kernels included (an hour or two)"
	@echo "make mutation   how many small mistakes in the Python layers the tests find"
	@echo "make bench      time against peers on the CPU, ten minutes at most (bench-gpu: on CUDA)"
	@echo "make docs       build the documentation into docs/_build/html"
	@echo "make audit      list dependencies and licences; look for known vulnerabilities"
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
	$(BIN)/pytest -n $(JOBS) -m "not slow and not gpu and not bench and not browser"

test-all: lint $(VENV)/.extra-browser
	@command -v chromium > /dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq \
		&& apt-get install -y -qq --no-install-recommends chromium; } \
		|| echo "There is no chromium, so the browser tests will be skipped"
	$(BIN)/pytest -n $(JOBS) --dist worksteal

coverage: $(VENV)/.extra-test
	$(BIN)/python tests/measure_coverage.py --jobs $(JOBS) --out $(VENV)/coverage

mutation: $(VENV)/.extra-test
	$(BIN)/python tests/mutation/run.py --jobs $(JOBS) --out $(VENV)/mutation

bench: $(VENV)/.extra-bench
	$(BIN)/python -m benchmarks --limit 570 --json docs/benchmarks/cpu.json

bench-gpu: $(VENV)/.extra-bench
	$(BIN)/python -m benchmarks --device cuda --limit 1700 --json docs/benchmarks/cuda.json

docs: $(VENV)/.extra-docs
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

audit: $(VENV)/.extra-test $(VENV)/.extra-docs $(VENV)/.extra-browser $(VENV)/.extra-bench
	$(BIN)/python tests/list_dependencies.py > docs/dependencies.md
	$(PIP) pip-audit
	$(BIN)/pip-audit --progress-spinner off --skip-editable

clean:
	rm -rf $(VENV) docs/_build docs/tutorials/[0-9]*.md build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find docs/_static -mindepth 1 -maxdepth 1 ! -name explore -exec rm -rf {} +
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
