"""train.py with a loss over the batch: refused where that is divided, else exact.

Where it is meant, the log says so.
"""

from pathlib import Path

import pytest
from launches import SMALL, main_in_world, read_metrics, refusal_in_world
from slow_rows import slow_but
from worlds import run_world

BASE = [*SMALL, "data.dataset.train_size=40", "data.dataset.test_size=8", "epochs=1", "device=cpu"]
CONTRASTIVE = "loss=own loss._target_=batch_losses.supervised_contrastive"
NUMBERS = (
    "task=regression data=own data.dataset._target_=own_datasets.numbers data.num_workers=0 "
    "model=own batch_size=16 "
)
NUMBERS += "model._target_=own_models.regressor epochs=1 device=cpu model.weights=null"
NEAREST = f"{NUMBERS} loss=own loss._target_=batch_losses.info_nce"
OWN_TASK = f"{NUMBERS} task._target_=batch_losses.Contrastive"


def with_base(line: str) -> str:
    return line if "data=" in line else " ".join([*BASE, *line.split()])


# By number of ranks: overrides, and what the message names.
REFUSED = {
    1: [
        (
            f"{CONTRASTIVE} accumulate=2",
            "loss._target_=batch_losses.supervised_contrastive: ",
            "accumulate=2 would",
        ),
        (
            f"{CONTRASTIVE} strategy=split strategy.num_microbatches=3",
            "loss._target_",
            "strategy.num_microbatches=3 would",
        ),
        (
            f"{NEAREST} accumulate=4",
            "loss._target_=batch_losses.info_nce: ",
            "accumulate=4 would compute it over 4 samples",
        ),
        (
            f"{OWN_TASK} accumulate=4",
            "task._target_=batch_losses.Contrastive: ",
            "not over the global batch of 16",
        ),
        (f"{CONTRASTIVE} accumulate=2 model.init=by_block", "loss._target_", "accumulate=2 would"),
    ],
    2: [
        (
            f"{CONTRASTIVE} strategy=ddp",
            "loss._target_",
            "strategy=ddp on 2 replicas would compute it over 12 samples",
        ),
        (f"{CONTRASTIVE} strategy=fsdp", "loss._target_", "strategy=fsdp on 2 replicas would"),
        (
            f"{CONTRASTIVE} strategy=scratch accumulate=2",
            "loss",
            "strategy=scratch on 2 replicas and accumulate=2 would",
        ),
        (
            f"{CONTRASTIVE} strategy=pipeline strategy.num_microbatches=2",
            "loss",
            "strategy.num_microbatches=2 would",
        ),
        (f"{CONTRASTIVE} strategy=mesh", "loss._target_", "strategy=mesh on 2 replicas would"),
        (
            f"{NEAREST} strategy=ddp",
            "loss._target_=batch_losses.info_nce: ",
            "of 16. Use strategy=single with accumulate=1; or",
        ),
    ],
}


def refusals(lines: list[str]) -> list[tuple[object, str]]:
    return [refusal_in_world(line) for line in lines]


@pytest.mark.parametrize("ranks", slow_but([2], REFUSED))
def test_loss_over_the_batch_is_refused_where_the_batch_is_divided(ranks):
    cases = REFUSED[ranks]
    ended = run_world(ranks, refusals, [with_base(line) for line, *_ in cases])[0]
    for (line, *parts), (code, printed) in zip(cases, ended, strict=True):
        assert code == 2, f"{line}: {printed}"
        assert (
            printed.count("error: ")
            == printed.count("the loss is not a sum over samples: it ")
            == 1
        ), f"{line}: {printed}"
        assert all(part in printed for part in parts), f"{line}: {printed}"
        assert "loss_over_batch=true" in printed


def train_all(folder: Path, runs: dict[str, str]) -> None:
    for name, line in runs.items():
        main_in_world(*with_base(line).split(), f"runs_dir={folder}", f"name={name}")


SCALED = "loss=own loss._target_=own_losses.scaled"
ONE = {
    "single": CONTRASTIVE,
    "dp": f"{CONTRASTIVE} strategy=dp",
    "micro": f"{CONTRASTIVE} strategy=split strategy.num_microbatches=1",
    "numbers": NEAREST,
    "ordinary": f"{SCALED} accumulate=2",
    "ordinary_single": SCALED,
}
TWO = {
    "tp": f"{CONTRASTIVE} strategy=tp strategy.tp=2",
    "meant": f"{CONTRASTIVE} strategy=ddp loss_over_batch=true",
    "parts": f"{CONTRASTIVE} strategy=ddp accumulate=3 loss_over_batch=true",
    # of which a rank gets one
    "replicated": f"{CONTRASTIVE} strategy=ddp accumulate=1 loss_over_batch=true batch_size=2",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_world(1, train_all, folder, ONE)
    run_world(2, train_all, folder, TWO)
    return folder


@pytest.mark.slow
def test_loss_over_the_batch_is_the_same_where_the_batch_is_not_divided(folder):
    expected = read_metrics(folder / "single")[-1]
    for name in ("dp", "micro", "tp"):
        row = read_metrics(folder / name)[-1]
        for key in ("train_loss", "test_loss"):
            assert row[key] == pytest.approx(expected[key], rel=1e-5), (name, key)


@pytest.mark.slow
def test_log_says_once_what_a_divided_loss_is_computed_over(folder):
    said = "loss_over_batch=true: the loss is computed over each local batch of "
    for name, samples in {"meant": 12, "parts": 4, "replicated": 1}.items():
        log = (folder / name / "train.log").read_text()
        assert log.count(said) == log.count(f"{said}{samples} samples") == 1, name
    assert said not in (folder / "single" / "train.log").read_text()
    losses = [
        read_metrics(folder / name)[-1]["train_loss"] for name in ("single", "meant", "parts")
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[1] > 0.1, "with fewer samples to compare with, the loss is smaller"


@pytest.mark.slow
def test_ordinary_loss_is_trained_with_accumulation(folder):
    losses = [
        read_metrics(folder / name)[-1]["train_loss"] for name in ("ordinary", "ordinary_single")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
