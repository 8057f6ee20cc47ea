# make train: install, then train LeNet on the digits with two ranks.  make test: install, then run the whole test suite.
PYTHON ?= python3
BIN := .venv/bin
# One thread a rank: torchrun's own default, said here so that it need not warn.
export OMP_NUM_THREADS ?= 1

.PHONY: train test lint compare bench soak tensorboard

train: .venv/installed
	$(BIN)/torchrun --standalone --nproc_per_node=2 train.py strategy=ddp

test: .venv/installed-dev
	$(BIN)/python -m pytest

lint: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

compare: .venv/installed
	$(BIN)/python scripts/compare.py

bench: .venv/installed
	mkdir -p runs
	$(BIN)/python scripts/bench.py --json runs/bench.json

soak: .venv/installed
	$(BIN)/python scripts/soak.py

tensorboard: .venv/installed
	$(BIN)/tensorboard --logdir runs --host localhost

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@
