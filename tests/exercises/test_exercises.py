"""Each exercise: the reference solution is right, the file to start from runs, and wrong solutions are told apart."""

import multiprocessing
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from ddp_lab.exercises.catalog import TITLES, load
from ddp_lab.exercises.processes import explain_failure

WRONG = {path.stem: tomllib.loads(path.read_text())["wrong"] for path in (Path(__file__).parent / "wrong").glob("*.toml")}


@pytest.fixture(scope="module")
def explain(tmp_path_factory):
    """Check solutions in a process of their own: after a use of autograd, as in other tests, ranks cannot be forked."""
    folder = tmp_path_factory.mktemp("exercises")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield lambda name, source: pool.submit(explain_source, name, source, folder / f"{name}.py").result(timeout=60)


def explain_source(name: str, source: str, file: Path) -> str | None:
    file.write_text(source)
    return explain_failure(load(name), file)


@pytest.mark.parametrize("name", TITLES)
def test_reference_solution_is_right(name, explain):
    assert explain(name, load(name).solution) is None


@pytest.mark.parametrize("name", TITLES)
def test_file_to_start_from_names_what_is_to_be_written(name, explain):
    exercise = load(name)
    assert exercise.template().count("raise NotImplementedError") == len(exercise.check.WRITE)
    assert "still raises NotImplementedError" in explain(name, exercise.template())


@pytest.mark.parametrize("name", TITLES)
def test_wrong_solutions_are_told_apart(name, explain):
    source = load(name).solution
    found = []
    for wrong in WRONG[name]:
        assert source.count(wrong["old"]) == 1, wrong["old"]
        text = explain(name, source.replace(wrong["old"], wrong["new"]))
        assert text is not None, wrong["new"]
        assert wrong["says"] in text
        found.append(wrong["says"])
    assert len(set(found)) >= 5
