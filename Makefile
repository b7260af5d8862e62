# make up       a cluster with a real model on this machine's CPU; ends with its URLs. Ctrl-C stops it.
# make test     lint, types, import contracts, then unit, contract, system and shape tests
# make help     all targets

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
# Other versions or extras: make up CONSTRAINTS= EXTRAS=cuda
CONSTRAINTS ?= constraints-cpu.txt
EXTRAS ?=
# Handed on, as in: make up ARGS="--decode 2 --port 8001"
ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
ROOMS := bench cli client common decode_svc kernels prefill_svc router
PIP_INSTALL = $(BIN)/python -m pip install -qq --no-input --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS))

# The repository root never gets onto sys.path: its folders are called common, router, kernels.
export PYTHONSAFEPATH := 1

comma := ,
# $(call step,what it does,simple command): quiet, a sign of life every 5 s, all that it said if it fails
define step
@echo "· $(1)"; log=$$(mktemp); \
$(2) >"$$log" 2>&1 & job=$$!; \
trap 'rm -f "$$log"' EXIT; trap 'kill $$job 2>/dev/null || true; exit 130' INT TERM; \
while sleep 0.5; kill -0 $$job 2>/dev/null; do \
	if (( SECONDS >= $${next:=5} )); then echo "  … $$SECONDS s"; next=$$((SECONDS + 5)); fi; \
done; \
wait $$job || { cat "$$log" >&2; echo "FAILED: $(1)" >&2; exit 1; }
endef

.PHONY: help setup setup-dev model up test lint format exact asan test-clients test-openapi test-compose bench bench-wire \
	chaos kill-matrix fuzz clean

help:
	@echo "make up           start a cluster here and print its URLs (ARGS=\"--prefill 2 --decode 2 --port 8001\")"
	@echo "make test         lint, then unit, contract, system and shape tests (PYTEST_ARGS=\"-k name\")"
	@echo "make exact        the full comparison with transformers' own generate"
	@echo "make asan         the C kernels under the address, undefined-behaviour and thread sanitizers"
	@echo "make test-clients the openai, langchain-openai, litellm and guidellm packages against a cluster"
	@echo "make test-openapi schemathesis on /openapi.json of a running cluster (MINUTES=5)"
	@echo "make test-compose the cluster in containers; needs a Docker engine"
	@echo "make chaos        10,000 requests under seeded faults (SEED=1 MINUTES=60 ARGS=\"--transport tcp\")"
	@echo "make kill-matrix  workers killed at every state and token;  make fuzz  rubbish on every socket"
	@echo "make bench        load on a running cluster (ARGS=\"--help\")"
	@echo "make bench-wire   what encryption and checksums of shipped KV cost over TCP, side by side"
	@echo "make lint         ruff, mypy, import contracts;  make format  rewrites"
	@echo "make model        fetch the default model;  make setup  only the environment;  make clean"

# ---------------------------------------------------------------- environment

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "needs Python 3.11 or newer; set PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "Python's venv module is missing; apt-get install python3-venv" >&2; exit 1; }
	$(call step,making $(VENV),$(PYTHON) -m venv --clear $(VENV))
	@touch $@

$(VENV)/.run: $(VENV)/.made pyproject.toml $(CONSTRAINTS)
	$(call step,installing pagerelay with torch and transformers,$(PIP_INSTALL) -e '.$(addsuffix ],$(addprefix [,$(EXTRAS)))')
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(call step,installing the test tools,$(PIP_INSTALL) -e '.[dev$(addprefix $(comma),$(EXTRAS))]')
	@touch $@

# The rooms under their import name, for the type checker.
.links/.made: Makefile
	@mkdir -p .links/pagerelay
	@for room in $(ROOMS); do ln -sfn ../../$$room .links/pagerelay/$$room; done
	@touch $@

setup: $(VENV)/.run

setup-dev: $(VENV)/.dev .links/.made

model: $(VENV)/.run
	@$(BIN)/pagerelay fetch-model

# ---------------------------------------------------------------- run

up: $(VENV)/.run
	@exec $(BIN)/pagerelay up $(ARGS)

bench: $(VENV)/.run
	@exec $(BIN)/python -m pagerelay.bench $(ARGS)

# The key is no secret: it guards nothing but these servers, on loopback.
WIRE_UP := $(BIN)/pagerelay up --transport tcp --port {port} --workers-endpoint tcp://127.0.0.1:0
bench-wire: $(VENV)/.run model
	@exec $(BIN)/python -m pagerelay.bench compare --rounds 3 --workload W2 $(ARGS) \
		--spec 'curve=PAGERELAY_CLUSTER_KEY=for-measuring-only-for-measuring-only $(WIRE_UP)' \
		--spec 'no-checksums=$(WIRE_UP) --set worker.checksums=false' \
		--spec 'plain=$(WIRE_UP)'

# ---------------------------------------------------------------- check

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Two files at a time, but nothing beside a test that has a cluster of its own.
ORDINARY := not slow and not exact and not compose and not asan and not clients
test: lint model
	$(BIN)/pytest -n 2 --dist loadfile -m "$(ORDINARY)" tests/unit tests/contract tests/shape $(PYTEST_ARGS)
	$(BIN)/pytest -m "$(ORDINARY)" tests/system $(PYTEST_ARGS)

# In an environment of its own: other people's clients bring plug-ins for pytest, and want other versions of what
# the constraints pin.
test-clients:
	@$(MAKE) --no-print-directory VENV=.venv-clients CONSTRAINTS= EXTRAS=clients setup-dev model
	.venv-clients/bin/pytest -W default -m clients $(PYTEST_ARGS)

asan: setup-dev
	$(BIN)/pytest -n 2 -m asan $(PYTEST_ARGS)

exact: setup-dev model
	$(BIN)/pytest -m exact $(PYTEST_ARGS)

# What tries to break the hand-off; small shares of these run in make test.
SEED ?= 1
MINUTES ?= 60
HELPERS := PYTHONPATH=tests/helpers

chaos: setup-dev model
	$(HELPERS) $(BIN)/python tests/helpers/chaos.py --seed $(SEED) --minutes $(MINUTES) $(ARGS)

kill-matrix: setup-dev model
	$(HELPERS) $(BIN)/python tests/helpers/killmatrix.py $(ARGS)

fuzz: setup-dev model
	$(HELPERS) $(BIN)/python tests/helpers/fuzz.py --seed $(SEED) $(ARGS)

test-openapi: setup-dev model
	$(HELPERS) $(BIN)/python tests/helpers/openapi_run.py --seed $(SEED) --minutes $(MINUTES) $(ARGS)

test-compose: setup-dev
	$(BIN)/pytest -m compose $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) .venv-clients .links build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
