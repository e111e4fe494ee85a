# kvring: `make up` runs a ring on this machine, `make test` checks everything CI checks.
#
#   PYTHON=python3.12         the interpreter to use; else the first of python3, 3.13, 3.12, 3.11 that fits
#   TORCH_INDEX=URL           a further package index to look for torch in. On Linux the default index
#                             brings the CUDA build (several GB); the index of PyTorch's CPU builds here
#                             saves that on a machine without a GPU. Both builds run kvring.
#   ARGS="--stages 2"         options for `kvring up` (make up), `kvring bench multiturn` (make bench),
#                             pytest (make test)
#   WORKERS=0                 test files run in so many processes at once (most of them wait for the
#                             processes they start)

PYTHON ?=
TORCH_INDEX ?=
ARGS ?=
WORKERS ?= 3

VENV := .venv
BIN := $(VENV)/bin
CREATED := $(VENV)/.created
INSTALLED := $(VENV)/.installed
MODEL := models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: help setup up test checks lint bench browser compiler clean
.DELETE_ON_ERROR:

help:
	@echo "make up       install what is missing, start a ring of three stages and its HTTP gateway"
	@echo "make test     lint, type check, tests: the same as CI"
	@echo "make setup    only install (.venv) and fetch the default model (models/)"
	@echo "make lint     ruff check, ruff format --check, mypy"
	@echo "make bench    cold against cached turns: table, JSON and plot in bench/out/"
	@echo "make browser  install Chromium for the page's tests (Debian and Ubuntu, as root)"
	@echo "make compiler install g++ for native kernels on a CPU (Debian and Ubuntu, as root)"
	@echo "make clean    remove caches and outputs (keeps .venv and models/)"

setup: $(INSTALLED) $(MODEL)

up: setup
	@exec $(BIN)/kvring up $(ARGS)

# Lint and types beside the tests, which mostly wait for processes that they start.
test: setup
	@$(MAKE) --no-print-directory -j 2 lint checks

checks: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	@exec $(BIN)/kvring bench multiturn $(ARGS)

# Without one, the page's tests are skipped and say so; nothing else needs it.
browser:
	@for name in chromium chromium-browser google-chrome-stable google-chrome; do \
	  if command -v $$name >/dev/null; then exit 0; fi; \
	done; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "make browser needs root and apt-get; or install the package chromium yourself" >&2; exit 1; \
	fi; \
	export DEBIAN_FRONTEND=noninteractive; \
	apt-get update -q && apt-get install -q -y --no-install-recommends chromium fonts-dejavu-core

# Without one, a CPU stage takes torch's kernels, at twice the time, and the tests of native ones are skipped.
compiler:
	@for name in c++ g++ clang++; do if command -v $$name >/dev/null; then exit 0; fi; done; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "make compiler needs root and apt-get; or install the package g++ yourself" >&2; exit 1; \
	fi; \
	export DEBIAN_FRONTEND=noninteractive; \
	apt-get update -q && apt-get install -q -y --no-install-recommends g++

clean:
	rm -rf build dist run logs bench/out .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(CREATED):
	@python=; \
	for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	  if $$candidate -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	      2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "kvring needs Python 3.11, 3.12 or 3.13 (aiozmq does not import on 3.14); found:" \
	    "$$($(or $(PYTHON),python3) --version 2>&1 | tail -n 1)." \
	    "Install one, or name it: make setup PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	if ! $$python -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "$$python has no venv/ensurepip module. On Debian and Ubuntu install the package" \
	    "$$($$python -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')," \
	    "then run make again." >&2; exit 1; \
	fi; \
	echo "creating $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV) && touch $@

$(INSTALLED): pyproject.toml constraints.txt | $(CREATED)
	$(BIN)/python -m pip install --disable-pip-version-check \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt -e ".[dev]"
	@touch $@

$(MODEL): | $(INSTALLED)
	@$(BIN)/kvring pull smollm2-135m
