"""Each exercise: its reference solution, the file to start from, and wrong solutions."""

import atexit
import gc
import multiprocessing
import re
import sys
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import warm
from slow_rows import slow_but

from ddp_lab.exercises import processes
from ddp_lab.exercises.catalog import TITLES, load
from ddp_lab.exercises.explain import named

FAST = [  # one of each form of exercise
    "accumulate",
    "ring_all_reduce",
    "overlap",
    "sharded_optimizer",
    "gpipe_schedule",
    "one_f_one_b_schedule",
    "resume_epoch",
    "spot_the_bug",
]
WRONG = {
    path.stem: tomllib.loads(path.read_text())["wrong"]
    for path in (Path(__file__).parent / "wrong").glob("*.toml")
}
# (LIMIT, GRACE) of a check, in seconds: ranks that wait for ever cost both. Only a busy machine
# needs the learner's.
LIMITS = (1.5, 0.2), (processes.LIMIT, processes.GRACE)


# of the nouns that texts count
PLURAL_OF_ONE = re.compile(
    r"\b1 (samples|ranks|micro-batches|stages|messages|all-reduces|calls|dimensions|batches)\b"
)


@pytest.fixture(scope="module")
def explain(tmp_path_factory):
    """Check solutions in a process of their own.

    After a use of autograd, as in other tests, ranks cannot be forked. They are forked 400 times.
    """
    folder = tmp_path_factory.mktemp("exercises")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=prepare_to_fork) as pool:
        yield lambda name, *arguments: pool.submit(
            explain_source, folder / f"{name}.py", name, *arguments
        ).result(timeout=60)


def prepare_to_fork() -> None:
    if sys.platform == "linux":
        warm.prepare_to_fork()
        atexit.register(gc.unfreeze)  # libraries complain at exit of objects that nothing frees


def explain_source(file: Path, name: str, source: str, expected: str | None) -> str | None:
    """Return what is wrong with a solution.

    Where that is not what is expected, return the answer of a second, longer check.
    """
    file.write_text(source)
    for processes.LIMIT, processes.GRACE in LIMITS:
        text = processes.explain_failure(load(name), file)
        if text is expected is None or (expected and expected in (text or "")):
            break
    return text


@pytest.mark.parametrize("name", slow_but(FAST, TITLES))
def test_reference_solution_is_right_and_the_file_to_start_from_names_what_is_to_be_written(
    name, explain
):
    exercise = load(name)
    assert explain(name, exercise.solution, None) is None
    assert exercise.template().count("raise NotImplementedError") == len(exercise.check.WRITE)
    missing = "still raises NotImplementedError"
    assert missing in explain(name, exercise.template(), missing)


@pytest.mark.parametrize("name", slow_but(FAST, TITLES))
def test_wrong_solutions_are_told_apart(name, explain):
    source = load(name).solution
    for wrong in WRONG[name]:
        assert source.count(wrong["old"]) == 1, wrong["old"]
        changed = source.replace(wrong["old"], wrong["new"])
        text = explain(name, changed, wrong["says"]) or "no mistake"
        assert wrong["says"] in text
        assert not PLURAL_OF_ONE.search(text), text
    assert len({wrong["says"] for wrong in WRONG[name]}) >= 5


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "no sample"),
        ([3], "sample 3"),
        ([3, 5], "samples 3 and 5"),
        ([1, 2, 3], "samples 1, 2 and 3"),
    ],
)
def test_numbered_things_are_named_in_words(values, text):
    assert named("sample", values) == text
