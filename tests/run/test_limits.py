"""What ends a run: max_steps, max_tokens and max_minutes, besides epochs; and its schedule."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import assert_same, start, train
from launches import SMALL, main_in_world, newest, read_metrics, read_steps, refusal_in_world
from torch.optim.lr_scheduler import LambdaLR
from worlds import run_world

from ddp_lab.training.plan import FitSettings, StepLimit, TrainSizes
from ddp_lab.training.progress import Progress
from ddp_lab.training.schedule import (
    Horizon,
    constant,
    cosine,
    make_scheduler,
    trapezoid,
)
from ddp_lab.training.timed_schedule import TimedSchedule

# of 100 samples in batches of 24, an epoch has five steps, the last one with 4 samples
PER_EPOCH = 5


def places(run_dir: Path) -> list[tuple[int, int]]:
    """Return epoch and step of each row of metrics.jsonl after an evaluation."""
    return [(row["epoch"], row["step"]) for row in read_metrics(run_dir)]


@pytest.mark.parametrize(
    ("limits", "expected", "why"),
    [
        ("max_steps=7", [(1, 5), (2, 7)], "ended: max_steps=7 is reached at step 7"),
        pytest.param(
            "max_steps=10",
            [(1, 5), (2, 10)],
            "ended: max_steps=10 is reached at step 10",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "max_steps=3 epochs=2",
            [(1, 3)],
            "ended: max_steps=3 is reached at step 3",
            marks=pytest.mark.slow,
        ),
        ("max_steps=30 epochs=1", [(1, 5)], None),
        pytest.param(
            "max_steps=7 data.loader=workers",
            [(1, 5), (2, 7)],
            "max_steps=7 is reached",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_first_limit_that_is_reached_ends_the_run(limits, expected, why, tmp_path):
    run_dir = tmp_path / "run"
    start(run_dir, 1, (*limits.split(), "data.num_workers=1"))
    assert places(run_dir) == expected
    log = (run_dir / "train.log").read_text()
    assert (why in log) if why else ("ended" not in log)
    assert f"result: epoch {expected[-1][0]} (last), test loss " in log
    assert newest(run_dir)["progress"]["step"] == expected[-1][1]


def test_schedule_ends_with_the_run(tmp_path):
    run_dir = tmp_path / "run"
    overrides = ("max_steps=7", "warmup_steps=2", "log_every=1", f"runs_dir={tmp_path}", "name=run")
    run_world(1, main_in_world, *SMALL, *overrides)
    rates = [row["lr"] for row in read_steps(run_dir)]
    cosines = [0.5 * (1 + math.cos(math.pi * step / 5)) for step in range(5)]
    assert rates == pytest.approx([0.01 * factor for factor in (1 / 3, 2 / 3, *cosines)])


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, "ddp"),
        *(pytest.param(2, name, marks=pytest.mark.slow) for name in ("pipeline", "fsdp")),
    ],
)
def test_run_that_is_extended_within_an_epoch_is_as_one_without_an_end(ranks, strategy, tmp_path):
    whole = train(tmp_path, "whole", "max_steps=13")
    extended = tmp_path / "extended"
    start(extended, ranks, (f"strategy={strategy}", "max_steps=7"))
    assert newest(extended)["progress"]["samples"] == 48
    start(extended, 1, ("strategy=single", "max_steps=13"))
    assert_same(newest(extended), whole, 1e-6)
    assert places(extended) == places(tmp_path / "whole") == [(1, 5), (2, 10), (3, 13)]
    rows = zip(read_metrics(extended), read_metrics(tmp_path / "whole"), strict=True)
    for row, expected in rows:
        assert row["train_loss"] == pytest.approx(expected["train_loss"], abs=1e-5)
        assert row["test_loss"] == pytest.approx(expected["test_loss"], abs=1e-5)

    start(extended, 1, ("strategy=single", "max_steps=13"))
    log = (extended / "train.log").read_text()
    assert "nothing to do: max_steps=13 is reached at step 13; raise max_steps to continue" in log


def test_weights_in_the_middle_of_an_epoch_may_be_the_best(tmp_path):
    run_dir = tmp_path / "run"
    overrides = ("max_steps=7", "data.val_fraction=0.1", "optimizer.lr=0.001")
    start(run_dir, 1, overrides)
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [4, 7]  # 90 samples are left to train on
    assert rows[1]["val_loss"] < rows[0]["val_loss"]
    assert "result: epoch 2 (best val_loss)" in (run_dir / "train.log").read_text()
    best = torch.load(run_dir / "checkpoints/best.pt", weights_only=True)
    assert best["progress"]["step"] == 7


def test_tokens_are_those_of_all_samples_with_partial_batches():
    sizes = TrainSizes(1, 1, 24, PER_EPOCH, 24, 0.1, 100)
    assert [sizes.steps_for(samples) for samples in (1, 24, 25, 96, 97, 100, 101, 248, 249)] == [
        *(1, 1, 2, 4, 5, 5, 6, 12, 13),
    ]


def train_on_text(folder: Path, *limits: str) -> None:
    """Train on 50 samples of 16 tokens; a second call resumes."""
    text = folder / "text.txt"
    text.write_text("abcdefgh" * 100)
    run_world(
        1,
        main_in_world,
        *f"task=tokens data=text data.root={text} data.context=16 data.num_workers=0 model=gpt "
        "model.depth=1 model.width=16 model.heads=2 "
        f"evaluate_test=end runs_dir={folder} name=run".split(),
        *limits,
    )


def test_max_tokens_ends_a_run_of_a_text(tmp_path):
    train_on_text(tmp_path, "batch_size=8", "max_tokens=300")
    # 19 samples are 304 tokens, of which batches of 8 have 128, 128 and 48
    assert places(tmp_path / "run")[-1][1] == 3
    assert "max_tokens=300 is reached at step 3" in (tmp_path / "run" / "train.log").read_text()


def test_max_tokens_counts_those_before_a_resume_with_another_batch_size(tmp_path):
    train_on_text(tmp_path, "batch_size=8", "max_tokens=256")
    train_on_text(tmp_path, "batch_size=4", "max_tokens=512")
    progress = newest(tmp_path / "run")["progress"]
    # 16 samples in 2 steps, and 16 more in 4
    assert (progress["samples"], progress["step"]) == (32, 6)


def test_schedule_of_steps_goes_on_after_a_resume_with_another_batch_size(tmp_path):
    common = *SMALL, "log_every=1", f"runs_dir={tmp_path}", "name=run"
    run_world(1, main_in_world, *common, "max_steps=4")
    run_world(1, main_in_world, *common, "max_steps=8", "batch_size=12")
    rates = [row["lr"] for row in read_steps(tmp_path / "run") if row["step"] > 4]
    cosines = [0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(4, 8)]
    assert rates == pytest.approx([0.01 * factor for factor in cosines])
    assert (
        "the batch size has changed: the schedule of the learning rate goes on after 4 of 8 "
        "optimizer steps"
    ) in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "epochs=null",
            "epochs=null: the run would have no end. Set epochs, or one of max_steps, ",
        ),
        (
            "max_tokens=9",
            "max_tokens=9: the samples of this dataset are no tokens. Use max_steps, ",
        ),
        ("max_steps=0", "max_steps=0: must be an integer of at least 1 or null"),
        (
            "warmup_steps=3 warmup_epochs=1",
            "warmup_steps=3: warmup_epochs=1 is set, too. Use one of them",
        ),
        (
            "warmup_steps=7 max_steps=7",
            "warmup_steps=7: must be less than the length of the run, 7 steps",
        ),
    ],
)
def test_limits_that_contradict_are_refused(line, message):
    code, errors = refusal_in_world(f"{' '.join(SMALL)} {line}")
    assert code == 2
    assert f"error: {message}" in errors


@pytest.mark.parametrize(
    ("keys", "warning"),
    [
        (
            "warmup_epochs=5 max_steps=4",
            "the warm-up of 25 steps does not end in this run of 4 steps, in which the learning "
            "rate rises to 15% of optimizer.lr",
        ),
        ("warmup_epochs=0.5 max_steps=4", ""),
    ],
)
def test_warm_up_that_does_not_end_within_the_run_is_said(keys, warning, tmp_path):
    run_dir = tmp_path / "run"
    start(run_dir, 1, tuple(keys.split()))
    log = (run_dir / "train.log").read_text()
    assert log.count("the warm-up of") == bool(warning)
    assert warning in log


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_run_ends_within_two_seconds_of_max_minutes(ranks, tmp_path):
    run_dir = tmp_path / "run"
    limit = 0.03 + 0.01 * ranks  # minutes, of which 50 steps take a part
    strategy = "strategy=ddp" if ranks > 1 else "strategy=single"
    # an epoch takes several times as long
    data = (
        "data.dataset.train_size=80000",
        "data.dataset.image_size=16",
        "data.dataset.channels=1",
        "evaluate_test=end",
    )
    line = (strategy, *data, "log_every=1", f"max_minutes={limit}")
    line += (f"runs_dir={tmp_path}", "name=run")
    run_world(ranks, main_in_world, *SMALL, *line, timeout=100)
    rows = read_metrics(run_dir)
    seconds = sum(row["seconds"] for row in rows)
    assert 60 * limit <= seconds < 60 * limit + 2
    last_step = rows[-1]["step"]
    log = (run_dir / "train.log").read_text()
    assert f"ended: max_minutes={limit} have passed at step {last_step}" in log

    progress = newest(run_dir)["progress"]
    predicted = re.search(r"about ([\d,]+) steps until the schedule", log)
    assert predicted
    assert int(predicted[1].replace(",", "")) == progress["horizon"]
    for row in read_steps(run_dir):
        done = max(0, row["step"] - 1) / progress["horizon"] if row["step"] > 50 else 0
        expected = 0.5 * (1 + math.cos(math.pi * min(1, done)))
        assert row["lr"] == pytest.approx(0.01 * expected)

    run_world(ranks, main_in_world, *SMALL, *line, timeout=100)
    log = (run_dir / "train.log").read_text()
    assert f"nothing to do: max_minutes={limit} have passed at step {last_step}; raise" in log


@pytest.mark.slow
def test_resumed_run_of_a_time_has_the_schedule_that_was_predicted(tmp_path):
    line = (*SMALL, "max_minutes=9", f"runs_dir={tmp_path}", "log_every=1", "max_steps=70")
    preempted = "inject=sigterm@rank=0,step=60"
    with pytest.raises(SystemExit):
        main_in_world(*line, "name=run", preempted)
    before = newest(tmp_path / "run")["progress"]
    assert before["step"] == 60
    assert before["horizon"] > 70
    shutil.copytree(tmp_path / "run", tmp_path / "longer")
    log = (tmp_path / "run" / "train.log").read_text()
    assert re.search(
        r"max_minutes=9: at \S+ ms a step about [\d,]+ steps\. "
        r"The schedule of the learning rate ends after 70 steps, the other limit of the run",
        log,
    )
    main_in_world(*line, "name=run")
    after = newest(tmp_path / "run")["progress"]
    assert (after["step"], after["horizon"]) == (70, before["horizon"])
    # max_steps ends the schedule here
    rates = {row["step"]: row["lr"] for row in read_steps(tmp_path / "run")}
    assert rates[61] == pytest.approx(0.01 * 0.5 * (1 + math.cos(math.pi * 60 / 70)))

    main_in_world(*line, "name=longer", "max_minutes=18")
    longer = newest(tmp_path / "longer")["progress"]
    assert longer["horizon"] == 2 * before["horizon"]


def test_end_of_a_timed_schedule_is_the_predicted_one_if_no_steps_end_it():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    horizon = Horizon()
    scheduler = make_scheduler(optimizer, cosine, horizon, PER_EPOCH)
    for _ in range(9):
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 1.0
    timed = TimedSchedule(horizon, max_minutes=2.0, batch_size=8)
    timed.resume(Progress(horizon=20, horizon_minutes=1.0))
    assert horizon.steps == 40
    limited = Horizon(30)
    timed = TimedSchedule(limited, max_minutes=2.0, batch_size=8)
    timed.resume(Progress(horizon=20, horizon_minutes=1.0))
    assert limited.steps == 30
    assert make_scheduler(optimizer, constant, Horizon(), 1).get_last_lr() == [1.0]


def test_steps_and_seconds_that_are_left():
    limits = (StepLimit("max_steps", 30, 30), StepLimit("max_tokens", 640, 20))
    settings = FitSettings(5, limits=limits, max_minutes=0.5)
    position = Progress(epoch=3, step=12, trained=10.0, seconds=5.0)
    assert settings.last_step == 20
    assert settings.steps_left(position, 12, PER_EPOCH) == 8
    assert settings.seconds_left(position) == 15.0
    assert FitSettings(5).steps_left(position, 12, PER_EPOCH) == 13
    assert FitSettings(None).steps_left(position, 12, PER_EPOCH) == math.inf
    assert FitSettings(None).seconds_left(position) == math.inf


def test_limits_of_samples_continue_with_the_present_batch_size():
    limits = (StepLimit("max_steps", 30, 30), StepLimit("max_tokens", 640, 20, of_samples=True))
    settings = FitSettings(5, limits=limits).continued(Progress(epoch=1, step=12), 6)
    assert [limit.steps for limit in settings.limits] == [30, 26]
    assert [limit.value for limit in settings.limits] == [30, 640]


@pytest.mark.parametrize(
    ("by_steps", "by_samples", "counts_epochs", "end", "position"),
    [
        (30, None, False, 30, 12),
        (None, None, False, None, 12),  # not predicted yet
        (None, 25, False, 25, 6),
        (30, 25, False, 30, 12),  # 18 steps are left by steps, and 19 by samples
        (32, 25, False, 25, 6),
        (30, 25, True, 30, 6),  # of a function of the epoch
    ],
)
def test_position_of_a_schedule_is_counted_as_its_end(
    by_steps, by_samples, counts_epochs, end, position
):
    """After 12 steps, which would be 6 with the present batch size."""
    horizon = Horizon(by_steps, by_samples, counts_epochs=counts_epochs)
    horizon.continue_at(12, 6)
    assert (horizon.steps, horizon.position(12)) == (end, position)
    last = {None: None, 30: 30, 25: 31}
    assert horizon.last_step == last[end]


@pytest.mark.parametrize(
    ("minutes", "warmup", "end", "place", "factor"),
    [
        # of 120 seconds 69 are left after 51 steps of a second
        (2.0, 0, 120, 51, 0.5 * (1 + math.cos(math.pi * 51 / 120))),
        (2.0, 200, 120, 51, 52 / 201),
        # of epochs
        (9.0, 0, 90, 15, 0.5 * (1 + math.cos(math.pi * 15 / 90))),
    ],
)
def test_end_that_is_predicted_after_a_resume_is_compared_in_steps_that_are_left(
    minutes, warmup, end, place, factor, caplog
):
    """The first 40 steps would be 4 with the present batch size, of which 90 are the epochs."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    horizon = Horizon(by_samples=90, warmup_steps=warmup)
    horizon.continue_at(40, 4)
    scheduler = make_scheduler(optimizer, cosine, horizon, PER_EPOCH)
    timed = TimedSchedule(horizon, minutes, 8)
    for step in range(1, 16):
        optimizer.step()
        scheduler.step()
        if step > 4:
            position = Progress(step=step + 36)
            timed.on_start(run_at(position, scheduler))
            timed.on_step_end(position)
    assert (horizon.steps, scheduler.last_epoch) == (end, place)
    assert scheduler.get_last_lr() == pytest.approx([factor])
    expected = (
        "the warm-up of 200 steps does not end in this run of 120 steps, in which the learning "
        "rate rises to 60% of optimizer.lr"
    )
    assert (expected in caplog.text) == (warmup > 0)


def test_end_is_predicted_anew_after_a_resume_with_another_batch_size():
    """Of 100 steps 40 are over; the others have a quarter of the samples, and take a second."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    horizon = Horizon()
    horizon.continue_at(40, 160)
    before = Progress(step=40, horizon=100, horizon_minutes=2.0, horizon_batch_size=32)
    timed = TimedSchedule(horizon, 2.0, batch_size=8)
    timed.resume(before)
    assert (horizon.steps, horizon.position(40)) == (40 + 4 * 60, 40)

    again = TimedSchedule(Horizon(), 2.0, batch_size=8)
    again.resume(replace(before))  # before the steps are timed
    assert again.horizon.steps == 40 + 4 * 60

    scheduler = make_scheduler(optimizer, cosine, horizon, PER_EPOCH)
    for step in range(1, 62):
        optimizer.step()
        scheduler.step()
        if step > 40:
            position = replace(before, step=step)
            timed.on_start(run_at(position, scheduler))
            timed.on_step_end(position)
            before = position
    # timed from step 50 to step 60, after which 60 of 120 seconds are left
    assert (horizon.steps, before.horizon, before.horizon_is_timed) == (120, 120, True)
    assert before.horizon_batch_size == 8
    assert scheduler.get_last_lr() == pytest.approx([0.5 * (1 + math.cos(math.pi * 61 / 120))])


@pytest.mark.slow
def test_run_whose_time_passes_before_its_end_is_predicted_says_so(tmp_path):
    run_dir = tmp_path / "run"
    start(
        run_dir, 1, ("max_minutes=0.001", "epochs=null", "warmup_epochs=9", "scheduler=trapezoid")
    )
    log = (run_dir / "train.log").read_text()
    assert "max_minutes=0.001 have passed after " in log
    assert "The end of the schedule is predicted after step 50: until then the learning" in log


def run_at(position: Progress, scheduler: LambdaLR) -> Any:
    """Return a stand-in of a run of one rank, in which every step has taken a second."""
    runtime = SimpleNamespace(is_main=True, broadcast_from_rank0=lambda name, make: make())
    return SimpleNamespace(
        current=lambda: SimpleNamespace(seconds_trained=float(position.step)),
        strategy=SimpleNamespace(runtime=runtime),
        eager=SimpleNamespace(scheduler=scheduler),
    )


def test_trapezoid_is_level_and_then_falls_to_zero():
    assert [trapezoid(progress, decay=0.25) for progress in (0.0, 0.5, 0.75, 0.875, 1.0)] == [
        *(1.0, 1.0, 1.0, 0.5, 0.0),
    ]
