# Everything lives in .venv beside this file; remove it to start over.
# PYTHON picks the interpreter that makes it: make demo PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
NOTEBOOK ?= notebooks/01_quickstart.ipynb

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help install demo test lint types unit nojit notebooks lab bench bench-codecs bench-gpu clean

help: ## show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' \
		$(MAKEFILE_LIST)

install: $(STAMP) ## make .venv and install the package in it (once)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "megatrain_nb needs Python 3.11 or later; '$(PYTHON)' is older or missing." \
			"Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Installing into .venv (once; some minutes: PyTorch alone is up to some GB)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install ## train a model through disk and RAM in the quickstart notebook
	@$(BIN)/python notebooks/run.py $(NOTEBOOK)

test: lint types unit nojit notebooks ## every check: style, imports, types, tests, notebooks

lint: install ## style and import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: install ## mypy, strict
	$(BIN)/mypy

unit: install ## tests and doctests, two at a time
	$(BIN)/pytest --numprocesses 2

nojit: install ## the kernels' tests again as plain Python, without numba's compiler
	NUMBA_DISABLE_JIT=1 $(BIN)/pytest $(wildcard tests/codec) tests/optim

notebooks: install ## run every notebook from top to bottom
	$(BIN)/pytest --nbval-lax --nbval-current-env --nbval-cell-timeout 600 \
		-o xfail_strict=true notebooks

lab: install ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab --notebook-dir=notebooks

bench: install ## measure; prints the tables of tests/benchmarks
	$(BIN)/pytest tests/benchmarks --benchmark-enable -s

bench-codecs: install ## loss of every codec against fp32; hours, goes on where it stopped
	$(BIN)/python -m tests.benchmarks.loss --markdown codec-loss.md

bench-gpu: install ## measure on a CUDA device: parity, speed, overlap; under 6 minutes
	$(BIN)/python -m tests.benchmarks.gpu

clean: ## remove what checks and builds leave; .venv stays
	rm -rf build dist *.egg-info .benchmarks .hypothesis .import_linter_cache \
		.mypy_cache .pytest_cache .ruff_cache
	find megatrain_nb tests notebooks -name __pycache__ -prune -exec rm -rf {} +

# Another environment that is active must not be taken for this one.
unexport VIRTUAL_ENV

# No network, no telemetry: what these train and read, they make or ship.
demo unit nojit notebooks bench bench-codecs bench-gpu: export HF_HUB_OFFLINE = 1
demo unit nojit notebooks bench bench-codecs bench-gpu: export HF_HUB_DISABLE_TELEMETRY = 1
demo unit nojit notebooks bench bench-codecs bench-gpu: export TOKENIZERS_PARALLELISM = false
