# Everything a person or a machine does with this repository. Needs python3 (3.11 or newer), pip and make.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
LADDER := $(VENV)/bin/ladder
STAMP  := $(VENV)/.installed
# The package inside each phase's folder: phases/05_paged_cache/paged_cache
PACKAGES := $(shell for folder in phases/[0-9]*/; do ls -d $$folder$$(basename $$folder | sed 's/^[0-9]*_//') 2>/dev/null; done)
# Two test processes, each with one torch thread, use two cores best; more cores take more processes. In the order of
# the files: else those with few tests come last, and they are the long ones.
JOBS   ?= 2
PYTEST = OMP_NUM_THREADS=1 MPLBACKEND=Agg $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# An environment that came with a copy of a checkout, or through a link, is installed for another one: installing this
# one there would change what that one runs.
define ITS_OWN
import json, os, sys, sysconfig
from importlib import metadata
from urllib.parse import unquote, urlsplit
found = [one for one in metadata.distributions(path=[sysconfig.get_path("purelib")]) if one.name == "inference-ladder"]
told = found[0].read_text("direct_url.json") if found else None
other = unquote(urlsplit(json.loads(told)["url"]).path) if told else ""
if other and os.path.isdir(other) and not os.path.samefile(other, os.getcwd()):
    sys.exit(f"$(VENV) is installed for {other}: remove it here, or name another, as in make setup VENV=.venv-2")
endef
export ITS_OWN

.DEFAULT_GOAL := help
.PHONY: help setup demo serve docs test test-fast test-long test-gpu test-newest lint format mypy weights bench figures notebooks clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | \
	  while IFS='|' read -r name text; do printf '  make %-11s %s\n' "$$name" "$$text"; done

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "python3 is $$($(PYTHON) -V 2>&1); this needs 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(PY) || { echo "Creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(PY) -c "$$ITS_OWN"
	@echo "Installing into $(VENV) (PyTorch is the large part)"
	@$(PY) -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

$(PY): # only where there is none
	@$(MAKE) --no-print-directory setup

setup: $(STAMP) ## create .venv and install everything at the pinned versions

demo: setup ## a real model answers through each phase that can; ends with a table of speeds
	@$(LADDER) demo

serve: setup ## serve the demo's model at http://127.0.0.1:8000, with a page to look at
	@$(LADDER) serve smollm2

test: setup lint weights ## linters, tests and every notebook: what CI runs
	LADDER_REQUIRE_WEIGHTS=1 $(PYTEST) -m 'not long' --nbval --nbval-current-env tests $(wildcard notebooks)

test-long: setup weights ## the tests that take minutes each, with other random draws every time
	LADDER_REQUIRE_WEIGHTS=1 $(PYTEST) -m long tests
	$(PYTEST) --hypothesis-profile=default -m 'not long' $$(grep -l '^from hypothesis' tests/*/test_*.py)

test-fast: setup ## the tests that need neither weights nor much time (under two minutes)
	$(PYTEST) -m 'not slow and not long and not weights and not gpu' tests

test-gpu: setup ## the tests that need a CUDA device
	$(PY) -m pytest -n 8 --dist worksteal -m 'gpu and not alone' tests
	$(PY) -m pytest -m 'gpu and alone' tests
	$(PY) -m pytest -n 8 --dist worksteal -m 'not gpu' tests/phases/test_06_*.py tests/phases/test_09_*.py tests/appendix/test_latency.py

test-newest: PY = build/newest/bin/python
test-newest: ## the fast tests and those of clients, with the newest packages in an environment of its own (some GB)
	rm -rf build/newest
	$(PYTHON) -m venv build/newest
	$(PY) -m pip install --quiet -e '.[test,clients]'
	$(PYTEST) -m 'not slow and not long and not weights and not gpu' tests
	$(PYTEST) -m 'not long and not gpu' tests/serving/test_clients.py tests/serving/test_agents.py
	$(PY) -m pip install --quiet llama-index-llms-openai-like  # it needs an older openai
	$(PYTEST) -m 'not long and not gpu' tests/serving/test_clients.py

lint: setup ## ruff format, ruff check, mypy --strict
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(MAKE) --no-print-directory mypy

# Every phase has a bench.py, which mypy takes for one module in many places: links give each a name of its own.
mypy: setup
	@rm -rf build/benches && mkdir -p build/benches
	@for file in phases/*/bench.py; do \
	  ln -s "$(CURDIR)/$$file" "build/benches/bench_$$(basename $$(dirname $$file)).py"; done
	$(VENV)/bin/mypy common inference_ladder benchmarks phases/*.py phases/appendix phases/commands phases/course $(PACKAGES) build/benches

format: setup ## let ruff format and fix what it can
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

weights: setup ## download and convert the models the tests use
	@$(LADDER) fetch smollm2
	@$(LADDER) fetch gemma3-270m

# Exit code 2 is a phase that says that it cannot be measured here, for want of a GPU.
bench: setup ## measure every phase against the one before it; BENCH=--record replaces the evidence
	@for phase in $$($(LADDER) list --names); do $(LADDER) bench $$phase $(BENCH) || [ $$? -eq 2 ] || exit 1; done

figures: setup ## draw every figure again from the evidence files
	@$(LADDER) plot

docs: $(PY) ## build the site in build/site/html from lessons, notebooks and docstrings; no network
	@$(PY) docs/site/build.py

notebooks: setup ## install JupyterLab and open the notebooks
	@$(PY) -m pip install --quiet -c constraints.txt -e '.[test,notebooks]'
	$(VENV)/bin/jupyter lab notebooks

clean: ## remove the environment and every cache of this checkout (downloaded models stay)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
