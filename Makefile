# `make help` lists the targets. Each target installs what it needs into .venv, in the versions of
# constraints.txt.
SHELL := bash
PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv
WORKERS ?= 4
# The tests of a file share worlds and launches, so one process runs all of them. conftest.py starts
# the longest files first.
PYTEST := python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# the tests of `make test`
MARKED ?= not slow
# NUMBER/COUNT: a part of the slow tests of `make test`; empty: all of them
PART ?=
QUICK := config data/test_loader.py data/test_images.py models/test_models.py observe/test_logger.py
# One thread per rank: torchrun's default, set here to avoid its warning.
export OMP_NUM_THREADS ?= 1
# Many processes import ddp_lab and the tests, which takes longer without compiled files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train test test-quick test-slow test-extra test-all test-versions test-oldest test-newest constraints lint mutants compare bench tensorboard site

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

train: .venv/installed ## train LeNet on the digits dataset with two ranks
	$(BIN)/torchrun --standalone --nproc_per_node=2 train.py strategy=ddp

test: .venv/installed-dev ## run the tests, except the slow ones, or those of MARKED="not extra"
	$(BIN)/$(PYTEST) -m "$(MARKED)" $(PART:%=--part %)

test-quick: .venv/installed-dev ## run the tests that start no launches
	$(BIN)/$(PYTEST) -m "not slow" $(QUICK:%=tests/%)

test-slow: .venv/installed-dev ## run the slow tests, which `make test` omits
	$(BIN)/$(PYTEST) -m "slow and not extra"

test-extra: .venv/installed-dev ## run further rows of the slow tests, which `.ci/run` omits
	$(BIN)/$(PYTEST) -m extra

test-all: .venv/installed-dev ## run all tests
	$(BIN)/$(PYTEST)

test-versions: test-oldest test-newest ## run test-quick on the oldest and on the newest versions that pyproject.toml allows

# fully_shard differs most between the versions, in what has no public function.
test-oldest test-newest: QUICK += strategies/test_equivalence.py
test-oldest: RESOLUTION = lowest-direct
test-newest: RESOLUTION = highest
test-oldest test-newest: test-%: .venv/installed-dev
	$(UV) venv --quiet --seed --allow-existing --python $(BIN)/python .venv-$*
	$(UV) pip compile --quiet --upgrade --python .venv-$* --resolution $(RESOLUTION) --all-extras pyproject.toml \
		--output-file .venv-$*/versions.txt
	$(UV) pip sync --quiet --python .venv-$* .venv-$*/versions.txt
	$(UV) pip install --quiet --python .venv-$* --no-deps --editable .
	$(UV) pip tree --python .venv-$* --package ddp_lab --depth 1
	.venv-$*/bin/$(PYTEST) -m "not slow" $(QUICK:%=tests/%)

constraints: .venv/installed-dev ## renew constraints.txt: the newest versions that pyproject.toml allows
	$(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras --no-annotate \
		--custom-compile-command "make constraints" pyproject.toml --output-file constraints.txt

lint: .venv/installed-dev ## run ruff and basedpyright
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright

mutants: .venv/installed-dev ## make 200 small errors in the code and report which no test notices (hours; resumes)
	$(BIN)/python scripts/mutants.py $(MUTANTS)

compare: .venv/installed ## compare all strategies on the same work and write a report
	$(BIN)/python scripts/compare.py

bench: .venv/installed ## measure what the training loop costs, against the same step in plain PyTorch
	mkdir -p runs
	$(BIN)/python scripts/bench.py --json runs/bench.json

tensorboard: .venv/installed ## show runs/ in TensorBoard on localhost
	$(BIN)/tensorboard --logdir runs --host localhost

# The variable disables the theme's advertisement of its successor.
site: .venv/installed-dev ## build the manual as a site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# uv is several times faster than pip. Of pip's settings it gets the index.
define install
@echo "Installing ddp_lab$(1) and the versions of constraints.txt into .venv; PyTorch has a few GB"
@index=$$($(BIN)/pip config get global.index-url 2> /dev/null); \
	export UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX-$${PIP_INDEX_URL-$$index}}"; \
	$(UV) pip install --python $(BIN)/python --constraint constraints.txt --editable '.$(1)'
@touch $@
endef

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt uv
	$(call install)

.venv/installed-dev: .venv/installed
	$(call install,[dev])
