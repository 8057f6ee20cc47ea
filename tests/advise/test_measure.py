"""`advise --measure`: what short runs of train.py take."""

import subprocess

import pytest
import warm

from ddp_lab.advise import measure
from ddp_lab.advise.advisor import Advisor
from ddp_lab.advise.devices import find_devices
from ddp_lab.advise.measure import summary
from ddp_lab.advise.report import table
from ddp_lab.commands import advise
from ddp_lab.launchers.short_run import ShortRun

LENET = ["data=synthetic", "data.dataset.channels=1", "data.dataset.train_size=64", "data.dataset.test_size=8", "batch_size=64"]


def run_of(*rates: float) -> ShortRun:
    return ShortRun([{"samples_per_second": rate} for rate in (1.0, *rates)], None)


@pytest.fixture
def advisor() -> Advisor:
    found = Advisor.of(LENET, None, find_devices("2xcpu"))
    found.rows = [found.plan(["strategy=single"]), found.plan(["strategy=ddp"])]
    return found


def test_short_runs_of_train_fill_in_images_per_second(advisor, monkeypatch, capsys):
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(subprocess, "Popen", warm.Warm)
    measure.measure(advisor, minutes=5)
    assert advisor.notes == []
    found = [row.measured for row in advisor.rows]
    assert all(each["images_per_second"] > 100 for each in found)
    assert all("mfu" not in each for each in found), "that of a CPU is not known"
    assert "ddp-0 ..." in capsys.readouterr().out


def test_command_recommends_the_fastest_that_was_measured(monkeypatch, capfd):
    monkeypatch.setattr(measure, "train", lambda given, *others: run_of(900.0 if "strategy=fsdp" in given else 800.0))
    advise.main(["--gpus", "2xcpu", "--measure", "--minutes", "1", *LENET])
    shown = capfd.readouterr().out
    assert " 800" in shown
    assert "Recommended: fsdp, the fastest that was measured" in shown


def test_strategies_alternate_until_their_rates_are_stable(advisor, monkeypatch):
    rates = {"single": iter([100.0, 120.0, 104.0, 105.0, 104.0]), "ddp": iter([50.0, 50.0])}
    order = []

    def train(given, ranks, out, name, left):
        order.append(name.partition("-")[0])
        return run_of(next(rates[order[-1]]))

    monkeypatch.setattr(measure, "train", train)
    measure.measure(advisor, minutes=1)
    assert advisor.notes == []
    assert order == ["single", "ddp", "single", "ddp", "single", "single", "single"]
    assert (advisor.rows[0].measured["images_per_second"], advisor.rows[0].measured["runs"]) == (104.0, 5)


def test_what_does_not_run_or_has_no_time_is_reported(advisor, monkeypatch):
    monkeypatch.setattr(measure, "train", lambda given, *others: ShortRun([], None, "it failed"))
    measure.measure(advisor, minutes=1)
    assert advisor.notes == [f"{row.name} was not measured: it failed" for row in advisor.rows]
    measure.measure(advisor, minutes=1e-9)
    assert advisor.notes[2:] == ["stopped after 1e-09 minutes; --minutes allows more"]


def test_measured_rate_and_mfu_are_shown():
    advisor = Advisor.of(LENET, None, find_devices("2xH100"))
    slow, fast = advisor.rows = [advisor.plan(["strategy=ddp"]), advisor.plan(["strategy=fsdp"])]
    slow.measured = summary(advisor, slow, [run_of(630.0, 650.0)])
    assert slow.measured["mfu"] == pytest.approx(slow.fullest.flops * 10 / 494e12), "64 images a step"
    fast.measured = slow.measured | {"images_per_second": 700.0}
    assert advisor.conclusion.startswith("Recommended: fsdp, the fastest that was measured")
    line = next(line for line in table(advisor).splitlines() if line.startswith("ddp "))
    assert line.split()[-2:] == ["640", f"{slow.measured['mfu']:.1%}"]
