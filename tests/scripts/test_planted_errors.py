"""The list of scripts/planted_errors.py matches the code. Planting all errors takes too long for `make test`."""

import subprocess
import sys

import pytest
from launches import ROOT

from scripts.planted_errors import ERRORS, Error, plant, run_tests


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_error_can_be_planted(error, tmp_path):
    path = tmp_path / error.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((ROOT / error.file).read_text())
    plant(error, tmp_path)
    assert path.read_text() != (ROOT / error.file).read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("b", "c", "'b' must occur once in a.py, but occurs 0 times"), ("a", "b", "occurs 2 times"), ("= a", "=", "no Python")],
)
def test_error_that_does_not_fit_is_refused(old, new, message, tmp_path):
    (tmp_path / "a.py").write_text("a = a\n")
    with pytest.raises(ValueError, match=message):
        plant(Error("name", "a.py", old, new, "tests/test_a.py::test_a"), tmp_path)


def test_errors_have_different_names():
    assert len({error.name for error in ERRORS}) == len(ERRORS)


def test_listed_tests_exist_and_are_not_slow(request):
    tests = {error.test for error in ERRORS} - {item.nodeid for item in request.session.items}
    if tests:  # unless this is the whole suite
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow", *sorted(tests)]
        collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert collected.returncode == 0, collected.stdout
        assert tests <= set(collected.stdout.splitlines())


def test_outcomes_are_those_of_pytest(tmp_path):
    """A test that is skipped or times out has no result."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "import pytest, time\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False, 'a - b'\n"
        "def test_skipped(): pytest.skip()\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError\n"
        "def test_broken(broken): pass\n"
        "def test_endless(): time.sleep(1000)\n"
    )
    words = {"good": "PASSED", "bad": "FAILED", "skipped": "no result", "broken": "ERROR"}
    tests = {f"tests/test_a.py::test_{name}": word for name, word in words.items()}
    assert run_tests(tmp_path, list(tests)) == tests
    endless = "tests/test_a.py::test_endless"
    assert run_tests(tmp_path, [endless], limit=2) == {endless: "no result"}
