"""`advise --measure`: what short runs take, and how their results are kept and offered again."""

import sys

import pytest
from warm import programs

from ddp_lab.advise import measure
from ddp_lab.advise.advisor import Advisor
from ddp_lab.advise.devices import find_devices
from ddp_lab.advise.measure import cache_of, offer, summary
from ddp_lab.advise.report import table
from ddp_lab.commands import advise
from ddp_lab.launchers.short_run import ShortRun

LENET = [
    "data=synthetic",
    "data.dataset.channels=1",
    "data.dataset.train_size=64",
    "data.dataset.test_size=8",
    "batch_size=64",
]


def run_of(*rates: float, **profile) -> ShortRun:
    return ShortRun([{"samples_per_second": rate} for rate in (1.0, *rates)], profile or None)


@pytest.fixture
def advisor(monkeypatch, tmp_path) -> Advisor:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    planner = Advisor.of(LENET, None, find_devices("2xcpu"))
    planner.rows = [planner.plan(["strategy=single"]), planner.plan(["strategy=ddp"])]
    return planner


@pytest.mark.slow
def test_short_runs_of_train_fill_in_images_per_second_and_are_offered_again(
    advisor, monkeypatch, capsys
):
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(sys, "executable", str(programs() / "python"))
    measure.measure(advisor, minutes=5)
    assert advisor.notes == []
    measured = [row.measured for row in advisor.rows]
    assert all(each["images_per_second"] > 100 for each in measured)
    assert all("mfu" not in each and "allocated" not in each for each in measured), (
        "those of a CPU are not known"
    )
    assert "ddp-0 ..." in capsys.readouterr().out
    advisor.rows = [advisor.plan(["strategy=single"])]
    offer(advisor)
    assert advisor.notes[0].endswith("; --measure measures again")
    assert advisor.rows[0].measured == measured[0]


@pytest.mark.covers("advise --measure", "advise --minutes")
def test_command_measures_and_later_offers_the_results(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Advisor, "candidates", lambda self: [["strategy=ddp"], ["strategy=fsdp"]])
    monkeypatch.setattr(
        measure,
        "train",
        lambda overrides, *others: run_of(900.0 if "strategy=fsdp" in overrides else 800.0),
    )
    for more, expected in (
        (["--measure", "--minutes", "1"], " 800"),
        ([], "images/s were measured on "),
    ):
        advise.main(["--gpus", "2xcpu", *more, *LENET])
        shown = capfd.readouterr().out
        assert expected in shown
        assert "Recommended: fsdp, the fastest that was measured" in shown


def test_data_that_are_no_images_are_not_measured(tmp_path, command):
    (tmp_path / "words.txt").write_text("a few words " * 200)
    line = f"task=tokens model=gpt data=text data.root={tmp_path / 'words.txt'} data.context=8"
    code, _, errors = command(advise.main, "--gpus", "2xcpu", "--measure", *line.split())
    assert code == 2
    assert "error: --measure: makes up images, but the samples of the data are none." in errors


def test_strategies_alternate_until_their_rates_are_stable(advisor, monkeypatch):
    rates = {"single": iter([100.0, 120.0, 104.0, 105.0, 104.0]), "ddp": iter([50.0, 50.0])}
    order = []

    def train(overrides, ranks, out, name, left):
        order.append(name.partition("-")[0])
        return run_of(next(rates[order[-1]]))

    monkeypatch.setattr(measure, "train", train)
    measure.measure(advisor, minutes=1)
    assert advisor.notes == []
    assert order == ["single", "ddp", "single", "ddp", "single", "single", "single"]
    assert (advisor.rows[0].measured["images_per_second"], advisor.rows[0].measured["runs"]) == (
        104.0,
        5,
    )


def test_what_does_not_run_again_or_has_no_time_is_reported_and_results_are_kept(
    advisor, monkeypatch
):
    failed = ShortRun([], None, "it failed")
    runs = iter([run_of(100.0), failed, failed])
    monkeypatch.setattr(measure, "train", lambda *arguments: next(runs))
    measure.measure(advisor, minutes=1)
    assert advisor.notes == [
        "ddp was not measured: it failed",
        "single was not measured again: it failed",
    ]
    assert advisor.rows[0].measured["images_per_second"] == 100.0
    measure.measure(advisor, minutes=1e-9)
    assert advisor.notes[2:] == ["stopped after 1e-09 min; --minutes allows more"]


def test_measured_peak_is_shown_beside_the_planned_one_of_the_same_kind(monkeypatch, tmp_path):
    """Both are bytes that torch allocates; the CUDA context and NCCL are in neither."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    advisor = Advisor.of(LENET, None, find_devices("2xH100"))
    advisor.rows = [advisor.plan(["strategy=ddp"]), advisor.plan(["strategy=fsdp"])]
    slow, fast = advisor.rows
    rows = [{"step": 10.0, "communication": 1.0}, {"step": 10.0, "communication": 3.0}]
    measured = summary(
        advisor, slow, [run_of(630.0, 650.0, peak_memory_bytes=[2**30, 2**31], rows=rows)]
    )
    assert measured["mfu"] == pytest.approx(slow.fullest.flops * 10 / 494e12), "64 images a step"
    assert (measured["exposed"], measured["allocated"]) == (0.2, 2**31)
    slow.measured = measured
    fast.measured = measured | {"images_per_second": 700.0}
    assert advisor.conclusion.startswith("Recommended: fsdp, the fastest that was measured")
    line = next(line for line in table(advisor).splitlines() if line.startswith("ddp "))
    planned = slow.fullest.allocated / 2**30
    assert line.split()[-5:] == ["640", f"{measured['mfu']:.1%}", "20%", f"{planned:.2f}", "2.00"]


def test_cache_depends_on_the_run_and_the_machine_but_not_on_the_strategy(advisor):
    others = [
        ([*LENET[:-1], "batch_size=32"], "2xcpu"),
        (LENET, "3xcpu"),
        ([*LENET, "strategy=ddp"], "2xcpu"),
    ]
    smaller, more, same = (
        cache_of(Advisor.of(overrides, None, find_devices(gpus))) for overrides, gpus in others
    )
    assert len({cache_of(advisor), smaller, more}) == 3
    assert cache_of(advisor) == same
