# `make help` lists the targets. Each target installs what it needs into .venv.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 3
# The tests of a file share worlds and launches, so one process runs all of them. conftest.py starts the longest files first.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
QUICK := config data/test_data.py data/test_decode.py data/test_mix.py models/test_models.py observe/test_log.py observe/test_logger.py
# One thread per rank: torchrun's default, set here to avoid its warning.
export OMP_NUM_THREADS ?= 1

.PHONY: help train test test-quick test-slow test-all lint compare bench soak tensorboard

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

train: .venv/installed ## train LeNet on the digits dataset with two ranks
	$(BIN)/torchrun --standalone --nproc_per_node=2 train.py strategy=ddp

test: .venv/installed-dev ## run the tests, except the slow ones
	$(PYTEST) -m "not slow"

test-quick: .venv/installed-dev ## run the tests that start no launches
	$(PYTEST) -m "not slow" $(QUICK:%=tests/%)

test-slow: .venv/installed-dev ## run the slow tests, which `make test` omits
	$(PYTEST) -m slow

test-all: test test-slow ## run all tests

lint: .venv/installed-dev ## run ruff and basedpyright
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright

compare: .venv/installed ## compare all strategies on the same work and write a report
	$(BIN)/python scripts/compare.py

bench: .venv/installed ## measure what the training loop costs, against the same step in plain PyTorch
	mkdir -p runs
	$(BIN)/python scripts/bench.py --json runs/bench.json

soak: .venv/installed ## start 20 launches of one torchrun and 20 of two, with random faults
	$(BIN)/python scripts/soak.py
	$(BIN)/python scripts/soak.py --agents 2

tensorboard: .venv/installed ## show runs/ in TensorBoard on localhost
	$(BIN)/tensorboard --logdir runs --host localhost

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@
