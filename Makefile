# Two commands: `make demo` runs the main job on this machine, `make test` proves the project.
# Needs Python 3.11 to 3.13 with venv. PYTHON=... names one; which build of torch is taken: README.md.

SUITABLE = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
	$$python -c "$(SUITABLE)" 2>/dev/null && echo $$python && break; done)
VENV := .venv
# Our own packages, installed in editable form
PROJECTS := . envs/reference envs/reference/training
BIN := $(VENV)/bin
SNAKEMAKE := $(BIN)/snakemake
PYTEST := $(BIN)/pytest
CONFIG ?=
CONFIGFILE := $(if $(CONFIG),--configfile $(CONFIG))

.PHONY: setup demo quick plan test test-unit test-workflow test-engine test-sglang test-hosts lint format clean

setup: $(VENV)/.installed
	$(SNAKEMAKE) --quiet progress rules -- deploy

$(VENV)/.installed: requirements.lock envs/reference/torch.in $(PROJECTS:%=%/pyproject.toml)
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 to 3.13 found; name one: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check -r envs/reference/torch.in
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation $(PROJECTS:%=-e %)
	@touch $@

demo: $(VENV)/.installed
	$(SNAKEMAKE) $(CONFIGFILE)
	@echo "report: $(CURDIR)/results/report.html"

quick: $(VENV)/.installed
	$(SNAKEMAKE) --configfile config/quick.yaml
	@echo "report: $(CURDIR)/results/report.html"

plan: $(VENV)/.installed
	$(SNAKEMAKE) --quiet progress rules $(CONFIGFILE) -- plan

# Tests that serve the real SGLang wait for interpreted kernels, two files at a time; they are the longest.
SGLANG_TESTS := -n 2 --dist loadfile tests/sglang

# Tests on hosts wait for these, and share nothing that two files at a time could break.
HOST_TESTS := -n 2 --dist loadfile tests/hosts

test: setup
	$(PYTEST) tests --ignore=tests/sglang --ignore=tests/hosts
	$(PYTEST) $(SGLANG_TESTS)
	$(PYTEST) $(HOST_TESTS)

test-unit: $(VENV)/.installed
	$(PYTEST) tests/unit

test-workflow: setup
	$(PYTEST) tests/workflow

test-engine: $(VENV)/.installed
	$(PYTEST) tests/engine

test-sglang: setup
	$(PYTEST) $(SGLANG_TESTS)

# On hosts that the tests make: needs root and packages of Debian (.ci/run installs them), and is skipped without.
test-hosts: setup
	$(PYTEST) $(HOST_TESTS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python -m ddtree_bench generate --check
	$(SNAKEMAKE) --lint

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile rules
	$(BIN)/python -m ddtree_bench generate

# What was measured lies in results/store and stays.
clean:
	rm -rf $(VENV) .snakemake .pytest_cache .mypy_cache .ruff_cache results/cells results/tables results/figures
	rm -rf results/report.html results/partial results/logs
