# `make test` and `make quickstart` need nothing but Python >= 3.10: each makes .venv and installs into it first.
PYTHON ?= python3
# SYSTEM_SITE=1: keep the torch and Transformer Engine of $(PYTHON), as in NVIDIA's containers (docs/containers.md).
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The suite starts some hundred processes: compiled modules are kept, and two cores are shared. Each of the WORKERS takes whole
# files, with ranks of its own, in the order of tests/conftest.py: long ones first. WORKERS=0 runs all tests in one process.
WORKERS ?= 2
TESTS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile \
	--no-loadscope-reorder --durations 20 --durations-min 5

# What differs first between versions of megatron-core, torch and transformers: layers, groups, pipelines, saves.
VERSION_TESTS := tests/platform tests/parallel tests/models/test_hf_parity.py tests/models/test_specs.py tests/models/moe \
	tests/checkpoint/test_saving.py tests/run/test_resume_settings.py tests/plan/test_teacher_split.py \
	$(patsubst %,tests/train/test_%.py,resume pair invariance moe_invariance) \
	-m 'not download' -k 'not killed and not disk and not dies and not retention and not error_on and not stopwatch'

# Apart from .venv: the site needs none of the packages of mkd.
DOCS := build/docs-env
EXTRAS := dev,quickstart,data,xtoken,tiktoken,log
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help install check test test-slow test-versions faults quickstart quickstart-on-policy quickstart-vlm invariance lint types docs clean
help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 28

install: $(READY)  ## set up .venv; SYSTEM_SITE=1 keeps the system's torch and Transformer Engine

check: lint types  ## lint, format, import contracts, types and the tests without ranks and downloads (two minutes)
	$(BIN)/ruff format --check .
	$(TESTS) -m "not ranks and not download"

test: lint  ## set up, then run ruff, import contracts and tests, but those that take long
	$(TESTS)

test-slow: lint  ## the same with the tests that take long
	MKD_SLOW=1 $(TESTS)

test-versions: $(READY)  ## the tests that depend most on megatron-core: PYTHON=python3.12 VENV=build/py312 has the newest
	$(BIN)/python -m pip list --disable-pip-version-check 2>/dev/null | grep -E '^(megatron-core|torch|transformers|numpy) '
	$(TESTS) $(VERSION_TESTS)

faults: $(READY)  ## print what every fault of the fault table leads to (an hour)
	MKD_SLOW=1 $(TESTS) -n 0 -m fault -p tests.faults

quickstart: $(READY)  ## set up, then distil a real small model on this machine's CPU
	$(BIN)/mkd quickstart

quickstart-on-policy: $(READY)  ## let the quickstart's student learn from its own text (ten minutes at most)
	$(BIN)/mkd quickstart --on-policy

quickstart-vlm: $(READY)  ## the same for a model with images; needs npm, which fetches the pictures
	$(BIN)/python tools/quickstart_vlm.py

invariance: $(READY)  ## print how far losses and gradients of every parallel layout are from one process
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.train.invariance
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.train.moe_invariance
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.train.vision_invariance
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.train.without_teacher
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.train.apart_invariance

lint: $(READY)  ## ruff and the import contracts
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo

types: $(READY)  ## mypy: strict packages, and no more errors than before in the others
	$(BIN)/python tools/check_types.py

docs:  ## build the documentation as a site with search, build/site; a broken link fails
	@test -x $(DOCS)/bin/mkdocs || { $(PYTHON) -m venv $(DOCS) && $(DOCS)/bin/python -m pip install --quiet \
		--disable-pip-version-check mkdocs-material -c constraints.txt; }
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet
	@echo "build/site/index.html; with the search: $(BIN)/python -m http.server -d build/site"

clean:  ## remove the environment, caches and build products; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "mkd needs Python >= 3.10; use make PYTHON=...")'
	@echo "setting up $(VENV) (a few minutes, once)"
	@$(PYTHON) -m venv --clear $(if $(SYSTEM_SITE),--system-site-packages) $(VENV)
ifdef SYSTEM_SITE
	@$(BIN)/python tools/system_constraints.py >$(VENV)/keep.txt
	@PIP_CONSTRAINT=$(VENV)/keep.txt $(PIP) setuptools
	@PIP_CONSTRAINT=$(VENV)/keep.txt $(PIP) --no-build-isolation -e '.[$(EXTRAS)]'
	@$(BIN)/python tools/system_constraints.py --check $(VENV)/keep.txt
else
	@$(PIP) torch -c constraints.txt
	@$(PIP) -e '.[$(EXTRAS)]' -c constraints.txt
endif
	@touch $@
