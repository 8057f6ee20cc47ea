"""Ranks that are slower than the others: numbers by hand, and launches in which a rank sleeps."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from launches import launch
from slow_ranks import BATCH, PHASE

from ddp_lab.observe.logger import FileLogger, Logger
from ddp_lab.observe.metrics_file import read_evaluations, read_rows
from ddp_lab.resilience.run_directory import note_stragglers, write_status
from ddp_lab.training.progress import Progress
from ddp_lab.training.stragglers import Detector, Lag, Stragglers, Work, lag_of
from ddp_lab.training.sync import Exchanged

STEPS = 10  # of a period of 10 s in the examples


def work(data: list[float], compute: list[float], seconds: float = 10.0) -> Work:
    """Return the work of STEPS steps from the seconds of each rank in a step."""
    return Work(seconds, STEPS, [STEPS * each for each in data], [STEPS * each for each in compute])


EVEN = work([0.1] * 3, [0.5] * 3)
SLOW = work([0.1] * 3, [0.5, 0.75, 0.5])  # 0.85 / 0.6 - 1 = 5 / 12


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        # the others wait until the slow rank has computed
        (SLOW, Lag(1, "compute", 5 / 12, 750.0, 500.0)),
        # 0.9 / 0.4 - 1, which is more than 0.5 / (1 - 0.5)
        (work([0.1, 0.6, 0.1], [0.3] * 3), Lag(1, "data", 1.25, 600.0, 100.0)),
        # data 0.2 s more, compute 0.1 s more: 0.8 / 0.5 - 1
        (work([0.1, 0.3, 0.1], [0.4, 0.5, 0.4]), Lag(1, "data", 0.6, 300.0, 100.0)),
        # of two ranks the slower is compared with the faster
        (work([0.0, 0.0], [0.5, 0.75]), Lag(1, "compute", 0.5, 750.0, 500.0)),
        # half of four ranks are slow, as on one node of two
        (work([0.0] * 4, [0.5, 0.75, 0.75, 0.5]), Lag(1, "compute", 0.5, 750.0, 500.0)),
        # compute is not known, or not of all ranks: only the wait for data counts, 0.2 / (1 - 0.2)
        (work([0.1, 0.3, 0.1], [0.0] * 3), Lag(1, "data", 0.25, 300.0, 100.0)),
        (work([0.1, 0.3, 0.1], [0.5, 9.0, 0.0]), Lag(1, "data", 0.25, 300.0, 100.0)),
        # 3 ms in place of 1 ms are three times as long, and nothing of a step of a second
        (work([0.001, 0.003, 0.001], [0.0] * 3), Lag(1, "data", 0.002 / 0.998, 3.0, 1.0)),
        # with collectives in the forward pass all ranks compute until the last one has its data
        (work([0.0, 0.5, 0.0], [0.9, 0.4, 0.9]), Lag(1, "data", 1.0, 500.0, 0.0)),
    ],
)
def test_lag_is_that_of_the_median_rank_and_of_the_larger_part(example, expected):
    lag = lag_of(1, example)
    assert lag._replace(slower=0, milliseconds=0, usual=0) == expected._replace(
        slower=0, milliseconds=0, usual=0
    )
    assert lag[2:] == pytest.approx(expected[2:])


def test_faster_rank_has_a_negative_lag():
    assert lag_of(2, work([0.0] * 3, [0.5, 0.5, 0.25])).slower <= 0


def added(detector: Detector, *works: Work) -> list[list[int]]:
    """Return the ranks that change after each of the works."""
    return [[lag.rank for lag in detector.add(each)] for each in works]


def test_rank_is_named_once_after_a_minute_and_has_recovered_after_another():
    detector = Detector(0.2, 60.0)
    assert added(detector, *[SLOW] * 6) == [[], [], [], [], [], [1]]
    assert detector.named[1] == pytest.approx(Lag(1, "compute", 5 / 12, 750.0, 500.0))
    assert added(detector, *[SLOW] * 12) == [[]] * 12
    assert added(detector, *[EVEN] * 6) == [[], [], [], [], [], [1]]
    assert not detector.named
    assert added(detector, *[EVEN] * 12) == [[]] * 12
    assert added(detector, *[SLOW] * 6)[-1] == [1], "it is named again"


def test_one_even_period_begins_the_minute_anew():
    detector = Detector(0.2, 60.0)
    assert added(detector, *[SLOW] * 5, EVEN, *[SLOW] * 5) == [[]] * 11
    assert added(detector, SLOW) == [[1]]
    assert added(detector, *[EVEN] * 5, SLOW, *[EVEN] * 5) == [[]] * 11
    assert added(detector, EVEN) == [[1]]


def test_period_is_the_mean_of_its_exchanges():
    """20 exchanges of half a second are a period, in which the slow ones count by their time."""
    detector = Detector(0.2, 60.0)
    short = [replace_seconds(EVEN), replace_seconds(SLOW)]  # on average (0.625 + 0.1) / 0.6 = 1.208
    assert added(detector, *(short * 60))[-1] == [1]
    detector = Detector(0.21, 60.0)
    assert not any(added(detector, *(short * 60)))


def replace_seconds(of: Work) -> Work:
    return of._replace(seconds=0.5)


def test_step_that_is_longer_than_a_period_counts_with_its_time():
    detector = Detector(0.2, 60.0)
    long = work([0.0] * 2, [3.0, 4.0], seconds=45.0)
    assert added(detector, long, long) == [[], [1]]


def test_difference_below_the_limit_is_never_named():
    detector = Detector(0.2, 60.0)
    example = work([0.0] * 3, [0.5, 0.59, 0.5])  # 18 %
    assert not any(added(detector, *[example] * 30))
    assert added(Detector(0.17, 60.0), *[example] * 6)[-1] == [1]


class Rows(Logger):
    def __init__(self):
        self.rows = []

    def straggler(self, row):
        self.rows.append(dict(row))


class Begun:
    """The hook of one rank, whose exchanges the test calls itself."""

    def __init__(self, monkeypatch, step: int = 0, rank: int = 0):
        self.now = 100.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        self.notes: list[list[dict]] = []
        self.logger = Rows()
        self.hook = Stragglers(
            Detector(0.2, 60.0), self.logger, lambda at, listed: self.notes.append(listed)
        )
        places = ["a", "b", "c"] if rank == 0 else None
        runtime = SimpleNamespace(
            rank=rank,
            world_size=3,
            device=SimpleNamespace(type="cpu"),
            gather_objects=lambda key, value: places,
        )
        strategy = SimpleNamespace(runtime=runtime, timer=None)
        self.run = SimpleNamespace(strategy=strategy, waited=0.0, position=Progress(step=step))
        self.hook.on_start(cast("Any", self.run))

    def exchange(self, seconds: float, steps: int, values: list[float]) -> None:
        self.now += seconds
        position = replace(self.run.position, step=self.run.position.step + steps)
        self.run.position = position
        exchanged = Exchanged(position, self.now, [], None, 0.0, False, (), None, False, values)
        self.hook.read(exchanged)


UNEVEN = [1.0, 5.0, 1.0, 7.5, 1.0, 5.0]  # data and compute of each rank in ten steps


def test_named_rank_is_in_the_log_the_rows_and_the_status(monkeypatch, caplog):
    begun = Begun(monkeypatch)
    with caplog.at_level(logging.INFO, "ddp_lab"):
        for _ in range(8):
            begun.exchange(10.0, 10, UNEVEN)
        (row,) = begun.logger.rows
        assert row.pop("slower") == pytest.approx(5 / 12)
        expected = {"epoch": 1, "step": 60, "rank": 1, "part": "compute", "state": "slow"}
        assert row == expected | {"place": "b"}
        assert [[rank["rank"] for rank in listed] for listed in begun.notes] == [[1]]
        for _ in range(6):
            begun.exchange(10.0, 10, [1.0, 5.0] * 3)
    assert [(row["step"], row["state"]) for row in begun.logger.rows] == [
        (60, "slow"),
        (140, "recovered"),
    ]
    assert begun.notes[-1] == []
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(
        "straggler: rank 1 (b) has been 42% slower than the median of the ranks for 60 s, up to "
        "step 60: compute takes 750.0 ms of its step, and 500.0 ms on the median rank. Look for"
    )
    assert second == (
        "straggler: rank 1 (b) has recovered: for 60 s, up to step 140, it was not slower than "
        "the others (compute before)"
    )


def test_resumed_run_counts_the_minute_anew(monkeypatch):
    """A new launch may have its ranks on other machines."""
    begun = Begun(monkeypatch)
    for _ in range(5):
        begun.exchange(10.0, 10, UNEVEN)
    resumed = Begun(monkeypatch, step=50)
    for _ in range(5):
        resumed.exchange(10.0, 10, UNEVEN)
    assert resumed.logger.rows == []
    resumed.exchange(10.0, 10, UNEVEN)
    assert [row["step"] for row in resumed.logger.rows] == [110]


def test_time_between_epochs_and_of_evaluations_is_no_part_of_a_step(monkeypatch):
    """With it, 5 s of 100 s would be a lag of 5 %, and not of 100 %."""
    begun = Begun(monkeypatch)
    waits = [0.0, 0.0, 5.0, 0.0, 0.0, 0.0]
    for _ in range(3):
        begun.exchange(10.0, 10, waits)
        begun.now += 100.0
        begun.hook.on_evaluated(begun.run.position, {}, 100.0)
        begun.exchange(10.0, 10, waits)
        begun.now += 100.0
        begun.hook.on_epoch_end(begun.run.position)
    assert [row["part"] for row in begun.logger.rows] == ["data"]
    assert begun.logger.rows[0]["slower"] == pytest.approx(1.0)


def test_exchange_within_an_evaluation_moves_the_beginning_of_the_next_steps_once(monkeypatch):
    begun = Begun(monkeypatch)
    begun.now += 1.0  # of the evaluation
    begun.exchange(9.0, 10, [0.0] * 6)
    begun.now += 99.0
    begun.hook.on_evaluated(begun.run.position, {}, 100.0)
    for _ in range(6):  # 5 s of 10 s
        begun.exchange(10.0, 10, [0.0, 0.0, 5.0, 0.0, 0.0, 0.0])
    assert begun.logger.rows[0]["slower"] == pytest.approx(1.0)


def test_steps_between_an_exchange_and_an_evaluation_count_with_the_next_ones(monkeypatch):
    """6 s before an evaluation and 4 s after it, in 5 s of which rank 1 waits."""
    begun = Begun(monkeypatch)
    for _ in range(6):
        begun.now += 6.0 + 100.0
        begun.hook.on_evaluated(begun.run.position, {}, 100.0)
        begun.exchange(4.0, 10, [0.0, 0.0, 5.0, 0.0, 0.0, 0.0])
    assert [row["slower"] for row in begun.logger.rows] == [pytest.approx(1.0)]


def test_own_work_is_that_since_the_last_exchange(monkeypatch):
    begun = Begun(monkeypatch, rank=1)
    begun.run.strategy.timer = SimpleNamespace(take=lambda steps: 0.25 * steps)
    begun.hook.on_start(cast("Any", begun.run))
    assert begun.hook.own_work() == [0.0] * 6, "no step was taken"
    begun.run.position.step = 4
    begun.run.waited = 1.5
    assert begun.hook.own_work() == [0.0, 0.0, 1.5, 1.0, 0.0, 0.0]
    begun.run.position.step = 6
    begun.run.waited = 2.0
    assert begun.hook.own_work() == [0.0, 0.0, 0.5, 0.5, 0.0, 0.0]
    begun.hook.on_epoch_end(begun.run.position)
    begun.run.waited = 0.25  # of the next epoch
    begun.run.position.step = 7
    assert begun.hook.own_work() == [0.0, 0.0, 0.25, 0.25, 0.0, 0.0]


def test_rows_of_stragglers_are_kept_on_resume_up_to_the_position_and_are_no_evaluations(tmp_path):
    constants = {"strategy": "ddp"}
    logger = FileLogger(tmp_path, (1, 0), constants, None, [])
    for step in (3, 9):
        logger.straggler({"epoch": 1, "step": step, "rank": 1, "slower": 0.5})
    assert read_evaluations(tmp_path / "metrics.jsonl") == []
    FileLogger(tmp_path, (1, 5), constants, None, [])
    expected = {"kind": "straggler", "epoch": 1, "step": 3, "rank": 1, "slower": 0.5}
    assert read_rows(tmp_path / "metrics.jsonl") == [expected | constants]


def test_status_keeps_the_stragglers_of_its_launch_only(tmp_path):
    file = tmp_path / "status.json"
    write_status(tmp_path, "running", 0, 0)
    note_stragglers(tmp_path, Progress(epoch=2, step=7), [{"rank": 1}])
    record = json.loads(file.read_text())
    assert (record["status"], record["epoch"], record["step"]) == ("running", 2, 7)
    assert record["stragglers"] == [{"rank": 1}]
    write_status(tmp_path, "finished", 2, 9)
    assert json.loads(file.read_text())["stragglers"] == [{"rank": 1}]
    write_status(tmp_path, "running", 0, 0)
    assert "stragglers" not in json.loads(file.read_text())


COMMON = (
    "device=cpu data=own data.dataset._target_=slow_ranks.Reading data.num_classes=2 "
    f"data.num_workers=0 data.mean=[0.0] data.std=[1.0] batch_size={BATCH} epochs=1 tracker=none "
    "straggler.seconds=2 straggler.slower=0.5 name=run "
)
SLEEPING = "model=own model._target_=slow_ranks.Sleeping"


def trained(folder, line: str, ranks: int = 3):
    """Train on some ranks; return the output, the rows of stragglers, and status.json."""
    code, output = launch(f"ddp-lab train --nproc {ranks} {COMMON} {line} runs_dir={folder}")
    assert code == 0, output
    rows = read_rows(folder / "run/metrics.jsonl")
    status = json.loads((folder / "run/status.json").read_text())
    return output, [row for row in rows if row["kind"] == "straggler"], status


@pytest.mark.slow
@pytest.mark.covers("straggler.seconds", "straggler.slower")
def test_slow_rank_is_named_with_its_part_and_recovers(tmp_path):
    """Three ranks: even, rank 1 computes slowly, even, rank 2 waits for its data until the end."""
    slow = "+model.rank=1 +data.dataset.rank=2"
    line = f"strategy=ddp {SLEEPING} {slow} +data.dataset.steps={4 * PHASE}"
    output, rows, status = trained(tmp_path, line)
    named = [(row["rank"], row["part"], row["state"]) for row in rows]
    assert named == [(1, "compute", "slow"), (1, "compute", "recovered"), (2, "data", "slow")]
    compute, recovered, data = (row["step"] for row in rows)
    earlier = 5  # a phase begins earlier by the batches of trials before the first step
    assert PHASE - earlier < compute < recovered
    assert 2 * PHASE - earlier < recovered < 4 * PHASE
    assert data > 3 * PHASE - earlier
    assert all(row["slower"] > 0.5 for row in rows if row["state"] == "slow")
    assert [(rank["rank"], rank["part"]) for rank in status["stragglers"]] == [(2, "data")]
    assert status["status"] == "finished"
    for log in (output, (tmp_path / "run/train.log").read_text()):
        assert log.count("straggler: rank 1 (") == 2
        assert log.count("straggler: rank 2 (") == 1
        assert ": compute takes " in log
        assert ": data takes " in log


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("scratch", marks=pytest.mark.extra),
        "scratch strategy.algorithm=bucketed",
        "fsdp",
    ],
)
def test_slow_compute_is_named_only_where_ranks_have_the_same_work(strategy, tmp_path):
    line = f"strategy={strategy} {SLEEPING} +model.rank=1 +data.dataset.steps={2 * PHASE}"
    _, rows, status = trained(tmp_path, line, ranks=2)
    expected = [] if strategy == "fsdp" else [(1, "compute", "slow")]
    assert [(row["rank"], row["part"], row["state"]) for row in rows] == expected
    assert len(status.get("stragglers", [])) == len(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        ("fsdp", SLEEPING),
        ("ddp strategy.batch_norm=sync", SLEEPING),
        # each rank reads the complete batch
        ("tp strategy.tp=2", "model=lenet +data.dataset.side=28 +data.dataset.replicas=1"),
        (
            "pipeline strategy.num_microbatches=2",
            "model=lenet +data.dataset.side=28 +data.dataset.replicas=1",
        ),
    ],
    ids=lambda text: text.partition(" ")[0],
)
def test_slow_data_is_named_under_all_strategies(strategy, model, tmp_path):
    line = f"strategy={strategy} {model} +data.dataset.rank=1 +data.dataset.phase=1 "
    _, rows, _ = trained(tmp_path, f"{line} +data.dataset.steps={2 * PHASE}", ranks=2)
    assert [(row["rank"], row["part"], row["state"]) for row in rows] == [(1, "data", "slow")]


@pytest.mark.slow
def test_even_ranks_are_not_named_and_null_compares_none(tmp_path):
    _, rows, status = trained(tmp_path, f"strategy=ddp {SLEEPING} +data.dataset.steps={5 * PHASE}")
    assert rows == []
    assert "stragglers" not in status
    line = f"strategy=ddp {SLEEPING} +model.rank=1 +data.dataset.steps={2 * PHASE}"
    _, rows, _ = trained(tmp_path / "null", f"{line} straggler.seconds=null")
    assert rows == []
