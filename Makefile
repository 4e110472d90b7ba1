# One set of commands, here and in CI. Each makes the environment that it needs in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help venv demo test check fix bench clean

help: ## show the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

venv: $(STAMP) ## make .venv with everything, torch as a CPU build where there is no GPU

$(STAMP): pyproject.toml setup.py scripts/install_torch.py $(wildcard eightfold/kernels/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Eightfold needs Python 3.11 or later; this is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python scripts/install_torch.py
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: venv ## fetch a small model, quantize it while it loads, and let it answer
	$(BIN)/eightfold demo

test: venv ## run all tests, one process a core
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

check: venv ## read only: lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: venv ## write: what lint and format can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv ## measure products, loading, generation and quality on this CPU
	$(BIN)/python -m eightfold.benchmarks.cpu
	$(BIN)/python -m eightfold.benchmarks.load
	$(BIN)/python -m eightfold.benchmarks.generation
	$(BIN)/python -m eightfold.benchmarks.perplexity

clean: ## remove the environment and everything built
	rm -rf $(VENV) build *.egg-info eightfold/kernels/*.so
