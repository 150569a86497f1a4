# What a person or CI does with Stepfence. Every target makes the environment it needs.
#
#   make up                     scheduler, front end and one CPU worker with a real model (ARGS="--runner scripted" ...)
#   make check                  format, lint, types, import contracts, protos
#   make test                   the tests (ARGS="tests/unit -k settings" ...)
#   make compose-test           docker compose up for real (WHEELS=dir with a CPU wheel of torch: the real worker, too)
#
# Where pip finds torch: by default where it finds everything else. PyPI's torch for Linux brings gigabytes of CUDA
# libraries; for a machine without a GPU:  make up TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_SPEC ?= torch>=2.11,<2.14
TORCH_INDEX ?=
PIP_FLAGS ?=
ARGS ?=
WHEELS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install $(PIP_FLAGS)
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
CALLERS_PATH := $(PATH)
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help setup up check test test-long sim sim-protocol chaos fuzz mutants bench compose-test gateway-test proto proto-baseline clean
.DEFAULT_GOAL := help

help: ## Show the targets.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

setup: $(DEV_STAMP) ## Make .venv with everything that tests and checks need.

up: $(RUN_STAMP) ## Start scheduler, front end and a worker here; Ctrl-C ends them.
	@# With the PATH of whoever calls: up prints commands that must work in their shell.
	@PATH="$(CALLERS_PATH)" $(BIN)/stepfence up $(ARGS)

check: $(DEV_STAMP) ## Format, lint, types, import contracts, protos.
	ruff format --check .
	ruff check .
	mypy
	lint-imports
	buf lint protos
	buf format --diff --exit-code protos
	buf breaking protos --against protos/baseline.binpb
	protos/generate.sh --check

test: $(DEV_STAMP) ## The tests, about ten minutes on two cores.
	pytest $(ARGS)

test-long: $(DEV_STAMP) ## The tests that take much longer.
	pytest -m "long and not gpu" --timeout 7200 $(ARGS)

mutants: $(DEV_STAMP) ## Plant faults in the core, one at a time: each must be caught by a test.
	python -m tests.mutants $(ARGS)

bench: $(DEV_STAMP) ## What scheduling costs, in seconds; no gates. Of the model: python -m tests.bench.cpu_engine.
	@for running in 32 256 1024; do python -m tests.bench.scheduler_step --running $$running || exit; done
	python -m tests.bench.scheduler_variants --steps 100

sim: $(DEV_STAMP) ## Search a million random steps for a broken rule (docs/simulation.md), about ten minutes; then the protocol's.
	$(BIN)/python -m scheduler_svc.simulation.core_simulation --steps 1000000 --check every $(ARGS)
	$(BIN)/python -m tests.simulation.search --steps 1000000

sim-protocol: $(DEV_STAMP) ## A million steps of whole deployments under trouble (docs/simulation-protocol.md).
	$(BIN)/python -m tests.simulation.search --steps 1000000 $(ARGS)

chaos: $(DEV_STAMP) ## Kill, freeze and cut off real processes for a minute each, and tell counts and pauses (docs/operations.md).
	pytest tests/chaos -m long --timeout 1800 -s $(ARGS)

fuzz: $(DEV_STAMP) ## A million malformed frames through every decoder and service.
	pytest tests/fuzz/test_in_process.py -m long --timeout 7200 $(ARGS)

compose-test: $(DEV_STAMP) ## Tests of images and compose files, with a Docker engine of their own where none runs.
	WHEELS="$(WHEELS)" tests/e2e/compose/run.sh $(ARGS)

gateway-test: $(DEV_STAMP) ## OpenAI's clients for Python and Node against real processes (needs node and npm).
	npm install --prefix tests/e2e/node --no-audit --no-fund --silent
	pytest tests/contract/openai tests/e2e/test_openai.py tests/e2e/test_clients_document.py -m "not long" --timeout 600 $(ARGS)

proto: $(DEV_STAMP) ## Format the protos and generate the Python beside them.
	buf format --write protos
	protos/generate.sh

proto-baseline: $(DEV_STAMP) ## Make the present protos the ones that later ones must not break.
	buf build protos -o protos/baseline.binpb

clean: ## Remove the environment and caches.
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist

$(VENV)/bin/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Stepfence needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# torch first, alone: only it is looked for in TORCH_INDEX.
$(RUN_STAMP): pyproject.toml | $(VENV)/bin/python
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH_SPEC)"
	$(PIP) -e ".[worker]"
	@touch $@

$(DEV_STAMP): pyproject.toml $(RUN_STAMP)
	$(PIP) -e ".[worker,dev]"
	@touch $@
