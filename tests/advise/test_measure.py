"""`advise --measure`: what short runs of train.py take, and how their results are kept and offered again."""

import pytest

from ddp_lab.advise import measure
from ddp_lab.advise.advisor import Advisor
from ddp_lab.advise.candidates import Candidate
from ddp_lab.advise.machine import find_machine
from ddp_lab.advise.measure import Run, cache_of, is_stable, offer, save, summary
from ddp_lab.advise.report import table
from ddp_lab.commands import advise

LENET = ["data=synthetic", "data.dataset.channels=1", "data.dataset.train_size=64", "data.dataset.test_size=8", "batch_size=64"]


def run_of(*rates: float, **profile) -> Run:
    return Run([{"samples_per_second": rate} for rate in (1.0, *rates)], profile or None)


@pytest.fixture
def advisor(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Advisor(LENET, None, find_machine("2xcpu"))


@pytest.fixture
def rows(advisor):
    return [advisor.plan(Candidate("single", {}, 1)), advisor.plan(Candidate("ddp", {}, 2))]


def test_short_runs_of_train_fill_in_images_per_second_and_are_offered_again(advisor, rows, monkeypatch, capsys):
    monkeypatch.setattr(measure, "ROUNDS", 1)
    assert measure.measure(advisor, rows, minutes=5) == []
    assert all(row.measured["images_per_second"] > 100 for row in rows)
    assert all(row.measured["mfu"] is None and row.measured["peak"] is None for row in rows), "those of a CPU are not known"
    assert "ddp-0 ..." in capsys.readouterr().out
    save(advisor, rows)
    again = [advisor.plan(Candidate("single", {}, 1))]
    (note,) = offer(advisor, again)
    assert note.endswith("; --measure measures again")
    assert again[0].measured == rows[0].measured


def test_command_measures_and_later_offers_the_results(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "train", lambda given, *others: run_of(900.0 if "strategy=fsdp" in given else 800.0))
    for more, expected in ((["--measure", "--minutes", "1"], " 800"), ([], "images/s were measured on ")):
        advise.main(["--gpus", "2xcpu", *more, *LENET])
        shown = capfd.readouterr().out
        assert expected in shown
        assert "Recommended: fsdp, the fastest that was measured" in shown


def test_strategies_alternate_until_their_rates_are_stable(advisor, rows, monkeypatch):
    rates = {"single": iter([100.0, 120.0, 104.0, 105.0, 104.0]), "ddp": iter([50.0, 50.0])}
    order = []

    def train(given, ranks, out, name, left):
        order.append(name.partition("-")[0])
        return run_of(next(rates[order[-1]]))

    monkeypatch.setattr(measure, "train", train)
    assert measure.measure(advisor, rows, minutes=1) == []
    assert order == ["single", "ddp", "single", "ddp", "single", "single", "single"]
    assert rows[0].measured["images_per_second"] == 104.0
    assert rows[0].measured["runs"] == 5


def test_what_does_not_run_or_has_no_time_is_reported(advisor, rows, monkeypatch):
    monkeypatch.setattr(measure, "train", lambda given, *others: Run([], None, "it failed"))
    assert measure.measure(advisor, rows, minutes=1) == [f"{row.name} was not measured: it failed" for row in rows]
    assert measure.measure(advisor, rows, minutes=1e-9) == ["stopped after 1e-09 minutes; --minutes allows more"]
    assert not rows[0].measured


def test_measured_rows_have_mfu_exposed_communication_and_the_fastest_is_recommended(advisor, rows):
    parts = {"compute": 6.0, "communication": 2.0, "waiting": 1.0, "data": 0.5, "idle": 0.5}
    profile = {"rows": [parts], "peak_memory_bytes": [2**30, 2**31]}
    (plan,) = rows[1].plans
    found = summary(rows[1], [run_of(640.0, **profile)], peak=1e12)
    assert found["mfu"] == pytest.approx(plan.flops * 10 / 1e12)
    assert (found["exposed"], found["peak"]) == (0.2, 2**31)
    advice = advisor.advise()
    slow, fast = (next(row for row in advice.rows if row.name == name) for name in ("ddp", "fsdp"))
    slow.measured, fast.measured = found, found | {"images_per_second": 700.0}
    assert advice.conclusion.startswith("Recommended: fsdp, the fastest that was measured")
    line = next(line for line in table(advice).splitlines() if line.startswith("ddp "))
    assert line.split()[-4:] == ["640", f"{found['mfu']:.1%}", "20%", "2.00"]


def test_cache_depends_on_the_run_and_the_machine(advisor):
    other = Advisor([*LENET[:-1], "batch_size=32"], None, find_machine("2xcpu"))
    more = Advisor(LENET, None, find_machine("3xcpu"))
    assert len({cache_of(advisor), cache_of(other), cache_of(more)}) == 3
    assert cache_of(advisor) == cache_of(Advisor([*LENET, "strategy=ddp"], None, find_machine("2xcpu")))


def test_rates_are_stable_if_two_runs_lie_close_to_each_other():
    assert not is_stable([run_of(100.0)])
    assert is_stable([run_of(100.0), run_of(104.0)])
    assert not is_stable([run_of(100.0), run_of(110.0)])
