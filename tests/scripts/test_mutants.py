"""scripts/mutants.py, on three functions: one is tested, one only called, and one is neither."""

import json
import time

import psutil
import pytest

from scripts import mutants
from scripts.mutants_covered import Covered, first_failed, run_tests
from scripts.mutants_made import Mutant, Place, apply, in_proportion, places, sample

PRICE = """
def total(price: int | None, count):
    return price * count


def is_dear(price):
    return price > 100


def rest(price, paid):
    return price - paid
"""
TEST_PRICE = """
import os

from ddp_lab.tasks import price


def test_total_of_a_forked_process():
    if (pid := os.fork()) == 0:
        os._exit(price.total(5, 3) != 15)
    assert os.waitpid(pid, 0)[1] == 0


def test_is_dear_returns_something():
    assert price.is_dear(500) in (True, False)
"""
TEST_BROKEN = """
from ddp_lab.tasks import price


def test_that_fails_without_an_error():
    assert price.total(1, 1) == 2
"""
LEFT_OUT = '''
"""A file of what is not mutated."""
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 3

__all__ = ["a" + "b"]


def function(a: int | None, /, b: int | str = "", *, c: "list[3]" = ()) -> int | None:
    """Return 1 + 1."""
    x: int | str = a
    logging.warning("%s" % 3)
    assert x, "no x" + 1
    return True
    raise ValueError("é" % 4)
'''


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    files = {
        "ddp_lab/__init__.py": "",
        "ddp_lab/tasks/__init__.py": "",
        "ddp_lab/tasks/price.py": PRICE,
        "tests/tasks/test_price.py": TEST_PRICE,
        "tests/test_broken.py": TEST_BROKEN,
        "pytest.ini": "[pytest]\nmarkers = slow\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_sample_is_killed_survives_or_is_not_covered_and_resumes(project, tmp_path, capsys):
    results = tmp_path / "results"
    arguments = ["--root", str(project), "--results", str(results), "--sample", "3", "--jobs", "1"]
    assert mutants.main(arguments) == 1, "one of three mutants is killed, which is less than 90 %"
    output = capsys.readouterr().out
    assert "tests/test_broken.py: " in output
    assert "left out: it fails without an error" in output
    first = rows(results / "mutants.jsonl")
    killed, survived = sorted(first, key=lambda row: row["status"])
    assert (killed["status"], survived["status"]) == ("killed", "survived")
    assert killed["mutant"].startswith("ddp_lab/tasks/price.py:3 ")
    assert killed["by"] == "tests/tasks/test_price.py::test_total_of_a_forked_process"
    assert survived["mutant"].startswith("ddp_lab/tasks/price.py:7 ")
    assert survived["tests"] == ["tests/tasks/test_price.py"]
    assert "survived: ddp_lab/tasks/price.py:7 " in output
    assert "\n-    return price > 100\n+    return" in output
    assert "not covered: ddp_lab/tasks/price.py:11 " in output
    assert output.splitlines()[-2].split() == ["all", "3", "1", "0", "1", "1"]
    assert (project / "ddp_lab/tasks/price.py").read_text() == PRICE

    covered = (results / "tests.jsonl").read_text()
    assert mutants.main(arguments) == 1
    assert capsys.readouterr().out.splitlines()[-5:] == output.splitlines()[-5:]
    assert rows(results / "mutants.jsonl") == first, "nothing runs twice"

    text = (results / "mutants.jsonl").read_text()
    # As if it had been interrupted while it wrote the last row.
    (results / "mutants.jsonl").write_text(text[:-5])
    assert mutants.main(arguments) == 1
    again = rows(results / "mutants.jsonl")
    assert [row["mutant"] for row in again] == [row["mutant"] for row in first]
    assert (results / "tests.jsonl").read_text() == covered


def test_mutants_of_annotations_messages_and_marks_are_left_out(tmp_path):
    (tmp_path / "left_out.py").write_text(LEFT_OUT)
    mutable = [place for place in places(tmp_path, "left_out.py") if apply(tmp_path, place)]
    assert [(place.line, place.operator) for place in mutable] == [(17, "ReplaceTrueWithFalse")]


def test_mutant_meets_the_tests_of_its_file_then_of_its_folder_then_the_fastest():
    mutant = Mutant(Place("ddp_lab/tasks/shop/price.py", 8, "AddNot", 0, (7, 9)), "", "")
    executed = {"ddp_lab/tasks/shop/price.py": [2, 7]}
    seconds = {
        "tests/run/test_fast.py": 1.0,
        "tests/run/test_price.py": 2.0,
        "tests/tasks/test_other.py": 30.0,
        "tests/tasks/test_price_rows.py": 50.0,
        "tests/run/test_slower.py": 90.0,
    }
    tests = [Covered(name, True, each, executed) for name, each in seconds.items()]
    outside = {"ddp_lab/tasks/shop/price.py": [2, 10]}
    tests.append(Covered("tests/tasks/test_elsewhere.py", True, 1.0, outside))
    tests.append(Covered("tests/tasks/test_fails.py", False, 1.0, executed))
    order = [
        "tests/tasks/test_price_rows.py",
        "tests/tasks/test_other.py",
        "tests/run/test_fast.py",
        "tests/run/test_price.py",
        "tests/run/test_slower.py",
    ]

    def met(*arguments):
        return [
            test.test for test in mutants.chosen(mutant, tests, mutants.arguments(list(arguments)))
        ]

    assert met("--files", "9") == order
    assert met("--files", "3") == order[:3]
    assert met("--files", "9", "--seconds", "33") == order[:4], "the first file is not counted"


def test_sample_is_the_same_for_a_seed_and_a_larger_one_adds_to_it(project):
    two, again, three = (sample(project, "ddp_lab", size, 7) for size in (2, 2, 3))
    assert two == again
    assert three[:2] == two
    assert sorted(mutant.place.line for mutant in three) == [3, 7, 11]
    assert sample(project, "ddp_lab/data", 3, 7) == []


def test_first_failed_test_is_named_with_its_parameters():
    summary = [
        "ERROR of something else",
        "FAILED tests/test_a.py::test_b[cpu-no norm] - assert 1",
        "FAILED c",
    ]
    assert first_failed(summary) == "tests/test_a.py::test_b[cpu-no norm]"
    assert first_failed(["1 passed"]) == ""


def test_sample_is_in_proportion_to_lines():
    assert in_proportion({"a": 70, "b": 20, "c": 10}, 10) == {"a": 7, "b": 2, "c": 1}
    assert in_proportion({"a": 2, "b": 1}, 2) == {"a": 1, "b": 1}
    assert in_proportion({"a": 2, "b": 1}, 10) == {"a": 2, "b": 1}


@pytest.mark.slow
def test_time_limit_ends_every_process_of_a_test_file(tmp_path):
    written = tmp_path / "pid"
    (tmp_path / "test_slow.py").write_text(
        "import os, time\n"
        "def test_that_hangs():\n"
        "    if (pid := os.fork()) == 0:\n"
        "        os.setsid()\n"
        "        time.sleep(600)\n"
        f"    open({str(written)!r}, 'w').write(str(pid))\n"
        "    time.sleep(600)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    started = time.monotonic()
    outcome = run_tests(tmp_path, "test_slow.py", 15)
    assert outcome.code is None
    assert time.monotonic() - started < 60
    assert has_ended(int(written.read_text()))


def has_ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
