"""The metrics of steps within an epoch: the same under every strategy, recorded everywhere."""

import time
from pathlib import Path

import pytest
import torch
from launches import SMALL, launch, main_in_world, read_metrics, read_steps
from own_models import waiting_blocks
from slow_rows import slow_but
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from worlds import once, run_world

from ddp_lab.models.trial import count_flops
from ddp_lab.observe import log
from ddp_lab.world.runtime import Runtime

# 5 steps an epoch, the last one of 4 samples
OVERRIDES = [*SMALL, "epochs=2", "log_every=2", "max_grad_norm=0.5"]
PEAK = 1e9  # FLOP/s of a device
# of a sample: convolution without the inputs' gradient, and head
FLOPS = 2 * (2 * 3 * 9 * 16 * 28**2 + 3 * 16 * 14**2 * 10)
STRATEGIES = {
    1: ["single", "split", "single data.loader=workers"],
    2: ["scratch", "ddp"],
}
FURTHER = {  # slow
    2: ["fsdp", "pipeline strategy.num_microbatches=3", "tp"],
    4: ["ddp_pipeline strategy.num_microbatches=3", "mesh strategy.shard=2"],
}


def pairs(strategies: dict[int, list[str]]) -> list[tuple[int, str]]:
    return [(ranks, name) for ranks, names in strategies.items() for name in names]


def train_each(folder: Path, lines: list[str]) -> None:
    Runtime.peak_flops = lambda self: PEAK
    log.SLOW = 0.01  # starting the processes of a loader takes longer
    for number, line in enumerate(lines):
        main_in_world(
            *OVERRIDES, f"runs_dir={folder}", f"name=run{number}", *f"strategy={line}".split()
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function of the number of ranks and the strategy that returns a run's directory."""
    folder = tmp_path_factory.mktemp("runs")

    @once
    def train(ranks: int, are_further: bool) -> Path:
        runs = folder / f"{ranks}-{are_further}"
        run_world(ranks, train_each, runs, (FURTHER if are_further else STRATEGIES)[ranks])
        return runs

    def run(ranks: int, strategy: str) -> Path:
        are_further = strategy in FURTHER.get(ranks, [])
        number = (FURTHER if are_further else STRATEGIES)[ranks].index(strategy)
        return train(ranks, are_further) / f"run{number}"

    return run


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    slow_but(pairs(STRATEGIES), [*pairs(STRATEGIES), *pairs(FURTHER)]),
)
def test_rows_of_steps_are_those_of_one_device(ranks, strategy, trained):
    rows = read_steps(trained(ranks, strategy))
    expected = read_steps(trained(1, "single"))
    assert [(row["epoch"], row["step"]) for row in rows] == [
        (1, 2),
        (1, 4),
        (2, 6),
        (2, 8),
        (2, 10),
    ]
    for row, single in zip(rows, expected, strict=True):
        for name in ("loss", "accuracy", "lr", "gradient_norm"):
            assert row[name] == pytest.approx(single[name], rel=1e-5), name
        assert row["world_size"] == ranks
        assert row["gradient_norm"] > 0.1
        assert 0 <= row["data_wait"] < 1
        assert min(row["samples_per_second"], row["peak_memory_MiB"]) > 0
        assert 0 <= row["eta_epoch"] <= row["eta"]
        assert row["mfu"] * PEAK * ranks / row["samples_per_second"] == pytest.approx(FLOPS)


def test_losses_of_an_epoch_are_the_means_of_its_rows(trained):
    """The last row of epoch 2 is at its end; of epoch 1 the last step is in no row."""
    rows = read_steps(trained(2, "ddp"))[2:]
    epoch = read_metrics(trained(2, "ddp"))[1]
    counts = [24, 48, 28]  # samples of step 6, steps 7 and 8, steps 9 and 10
    for name in ("loss", "accuracy"):
        mean = sum(row[name] * count for row, count in zip(rows, counts, strict=True)) / 100
        assert mean == pytest.approx(epoch[f"train_{name}"], rel=1e-9)


def test_rows_of_steps_are_scalars_of_tensorboard(trained):
    run_dir = trained(2, "ddp")
    board = EventAccumulator(str(run_dir / "steps")).Reload()
    for name in (
        "loss",
        "accuracy",
        "lr",
        "samples_per_second",
        "data_wait",
        "gradient_norm",
        "peak_memory_MiB",
    ):
        shown = [(each.step, each.value) for each in board.Scalars(f"step/{name}")]
        assert shown == [
            (row["step"], pytest.approx(row[name], rel=1e-6)) for row in read_steps(run_dir)
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["python train.py", "python -m ddp_lab train --nproc 2 strategy=ddp"]
)
def test_seconds_make_rows_and_lines_of_a_redirected_output(line, tmp_path):
    """The ranks agree on the steps, although their clocks and starts differ."""
    more = [
        "data.dataset.train_size=2400",
        "epochs=2",
        "log_every=0.05s",
        f"runs_dir={tmp_path}",
        "name=run",
    ]
    code, output = launch(line, *SMALL, *more)
    assert code == 0, output
    steps = [row["step"] for row in read_steps(tmp_path / "run")]
    assert len(steps) >= 4
    assert steps == sorted(set(steps))
    assert f"epoch 2, step {steps[-1]}: loss " in output
    assert " samples/s, " in output
    assert " of the run" in output


def test_flops_of_a_model_that_reads_values_are_unknown():
    model = waiting_blocks(1, 2, 3)
    assert count_flops(model, torch.ones(2, 1, 2, 2)) is None
    assert not any(
        parameter.is_meta or parameter.grad is not None for parameter in model.parameters()
    )


def test_evaluation_that_takes_time_is_logged(trained):
    assert (
        "epoch 1: evaluating ..."
        in (trained(1, "single data.loader=workers") / "train.log").read_text()
    )


def test_what_takes_time_is_logged_again_until_it_ends(monkeypatch):
    told = []
    monkeypatch.setattr(log, "SLOW", 0.3)
    monkeypatch.setattr(log, "AGAIN", 0.1)
    with log.log_if_slow("short", told.append):
        pass
    with log.log_if_slow("long", told.append):
        time.sleep(1)
    assert 2 <= len(told) <= 9
    assert {*told} == {"long ..."}


def train_slowly(line: list[str]) -> str:
    """Train, where what takes half a second is logged; return what this rank prints."""
    log.SLOW = 0.5
    return main_in_world(*line)


def test_what_takes_time_before_the_first_step_is_logged_by_rank_0(tmp_path):
    data = [
        "data=own",
        "data.dataset._target_=own_datasets.Slow",
        "data.image_size=24",
        "data.resize=24",
    ]
    more = [
        "data.loader=workers",
        "model=simple_cnn",
        "batch_size=20",
        "epochs=1",
        f"runs_dir={tmp_path}",
        "name=run",
    ]
    first, second = run_world(2, train_slowly, ["strategy=ddp", *data, *more])
    for activity in (
        "preparing the data: downloading or reading ...",
        "loading the first batch ...",
    ):
        assert (first.count(activity), second.count(activity)) == (1, 0), first + second
