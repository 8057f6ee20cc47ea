# `make help` lists the targets. Each installs into .venv what it needs.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 3  # on two cores: many tests wait for a timeout
# A file's tests share worlds and launches, so one process runs all of them; conftest.py has the longest first.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
QUICK := test_config test_data test_models test_plot test_logger
# One thread a rank: torchrun's own default, said here so that it need not warn.
export OMP_NUM_THREADS ?= 1

.PHONY: help train test test-quick test-slow test-all lint compare bench soak tensorboard

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

train: .venv/installed ## train LeNet on the digits with two ranks
	$(BIN)/torchrun --standalone --nproc_per_node=2 train.py strategy=ddp

test: .venv/installed-dev ## everything once: each strategy, fault, launch line, message
	$(PYTEST) -m "not slow"

test-quick: .venv/installed-dev ## an answer in a minute: what needs no launches
	$(PYTEST) -m "not slow" $(QUICK:%=tests/%.py)

test-slow: .venv/installed-dev ## what `make test` leaves out: more examples of the same
	$(PYTEST) -m slow

test-all: test test-slow ## both

lint: .venv/installed-dev ## ruff, and the types of ddp_lab/
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright

compare: .venv/installed ## every strategy on the same work, with a report
	$(BIN)/python scripts/compare.py

bench: .venv/installed ## speed against other loops
	mkdir -p runs
	$(BIN)/python scripts/bench.py --json runs/bench.json

soak: .venv/installed ## random faults, for hours if you like
	$(BIN)/python scripts/soak.py

tensorboard: .venv/installed ## show runs/ on localhost
	$(BIN)/tensorboard --logdir runs --host localhost

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@
