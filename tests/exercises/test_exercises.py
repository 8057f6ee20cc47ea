"""Each exercise: the reference solution is right, the file to start from runs, and wrong solutions are told apart."""

import tomllib
from pathlib import Path

import pytest

from ddp_lab.exercises.catalog import TITLES, load
from ddp_lab.exercises.processes import explain_failure

WRONG = {path.stem: tomllib.loads(path.read_text())["wrong"] for path in (Path(__file__).parent / "wrong").glob("*.toml")}


def explain(name: str, source: str, folder: Path) -> str | None:
    file = folder / f"{name}.py"
    file.write_text(source)
    return explain_failure(load(name), file)


@pytest.mark.parametrize("name", TITLES)
def test_reference_solution_is_right(name, tmp_path):
    assert explain(name, load(name).solution, tmp_path) is None


@pytest.mark.parametrize("name", TITLES)
def test_file_to_start_from_names_what_is_to_be_written(name, tmp_path):
    exercise = load(name)
    assert exercise.template().count("raise NotImplementedError") == len(exercise.check.WRITE)
    assert "still raises NotImplementedError" in explain(name, exercise.template(), tmp_path)


@pytest.mark.parametrize("name", TITLES)
def test_wrong_solutions_are_told_apart(name, tmp_path):
    source = load(name).solution
    found = []
    for wrong in WRONG[name]:
        assert source.count(wrong["old"]) == 1, wrong["old"]
        text = explain(name, source.replace(wrong["old"], wrong["new"]), tmp_path)
        assert text is not None, wrong["new"]
        assert wrong["says"] in text
        found.append(wrong["says"])
    assert len(set(found)) >= 5
