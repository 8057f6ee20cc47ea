"""`verify`: fresh processes, one message for each error of the user's code, and no process left."""

import functools
import inspect
import os
import subprocess
import sys

import foreign_steps
import psutil
import pytest
from launches import ROOT, SUPPORT
from warm import programs

from ddp_lab import verify
from ddp_lab.config.errors import ConfigError
from ddp_lab.proof.foreign import compare
from ddp_lab.proof.foreign_server import Server
from ddp_lab.proof.report import Row


@pytest.fixture(scope="module")
def rows_of():
    """Return a function that compares a step and returns the rows; all share one server."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # as in a rank of torchrun
            patch.setenv(name, "0")
        server = Server(foreign_steps.dispatch)
    with server:

        def rows_of(step, sizes=(2,), timeout=60.0) -> dict[str, Row]:
            named = (step.__name__, foreign_steps.batch_of())
            report = compare(server, named, sizes, None, timeout)
            return {row.name: row for row in report.rows}

        yield rows_of


def place_of(step, text: str) -> str:
    """Return the place of a line of a step, as messages name it."""
    lines, first = inspect.getsourcelines(step)
    (number,) = [number for number, line in enumerate(lines, first) if text in line]
    return f"(foreign_steps.py, line {number})"


def test_ddp_with_prefixed_names_is_equal_for_all_numbers_of_ranks():
    report = verify(foreign_steps.ddp, foreign_steps.batch_of())
    assert [(row.name, row.outcome) for row in report.rows] == [
        ("1 rank", "equal"),
        ("2 ranks", "equal"),
        ("4 ranks", "equal"),
    ]
    assert report.rows[0].reason == "the reference: 4 tensors", "one has no gradient"
    assert report.ok


def test_missing_all_reduce_is_found_from_parts_of_the_batch():
    report = verify(foreign_steps.unsummed, foreign_steps.batch_of(), nproc=(2,))
    row = report.rows[1]
    assert row.outcome == "different"
    cause = "whose mean is the expected one, and each is that of the rank's own samples"
    assert cause in row.difference.cause
    assert "all 4 tensors, different on each rank" in str(report)
    assert not report.ok


def test_sharded_gradients_are_gathered(rows_of):
    assert rows_of(foreign_steps.fsdp)["2 ranks"] == Row("2 ranks", "equal")


def test_step_sees_its_place_one_thread_no_gpu_and_the_complete_batch(rows_of):
    rows = rows_of(foreign_steps.of_environment)
    assert list(rows.values()) == [
        Row("1 rank", "equal", "the reference: 2 tensors"),
        Row("2 ranks", "equal"),
    ]


def test_exception_of_one_rank_is_reported_once_with_file_and_line(rows_of):
    rows = rows_of(foreign_steps.raises, (2, 3))
    place = place_of(foreign_steps.raises, "raise ValueError")
    assert rows["2 ranks"] == Row(
        "2 ranks", "failed", f"rank 1: ValueError: no such sample {place}"
    )
    assert rows["3 ranks"].outcome == "equal", "the next number of ranks is not affected"


def test_exception_with_one_rank_ends_the_comparison(rows_of):
    rows = rows_of(foreign_steps.raises_alone)
    assert list(rows) == ["1 rank"]
    assert rows["1 rank"].outcome == "failed"
    assert rows["1 rank"].reason.startswith("IndexError: index 100 is out of bounds")
    assert rows["1 rank"].reason.endswith(place_of(foreign_steps.raises_alone, "return"))


def test_process_that_exits_is_reported(rows_of):
    rows = rows_of(foreign_steps.exits, (2, 3))
    ended = "rank 1: its process ended with exit code 3, without a result"
    assert rows["2 ranks"] == Row("2 ranks", "failed", ended)
    place = place_of(foreign_steps.exits, "sys.exit")
    assert rows["3 ranks"].reason.endswith(f": it called sys.exit(enough) {place}")


def test_hang_is_reported_with_the_line_of_each_rank_that_waits(rows_of):
    rows = rows_of(foreign_steps.hangs, (2, 3), timeout=4)
    assert rows["2 ranks"].reason == (
        f"not done within 4 s: rank 0 waits in barrier {place_of(foreign_steps.hangs, 'barrier')}; "
        "rank 1 has returned. If the step is slow, pass timeout="
    )
    place = place_of(foreign_steps.hangs, "sleep")
    assert f"rank 2 is busy {place}" in rows["3 ranks"].reason


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (foreign_steps.returns_list, "step returned list. Return a mapping of names to tensors"),
        (foreign_steps.returns_number, "step returned 'loss': float. Return a mapping of names"),
    ],
)
def test_result_that_is_no_mapping_of_tensors_is_refused(step, says, rows_of):
    assert rows_of(step)["1 rank"].reason.startswith(says)


def test_step_without_tensors_is_refused(rows_of):
    with pytest.raises(ConfigError, match="step returned no tensors; return gradients or weights"):
        rows_of(foreign_steps.returns_nothing)


def test_tensors_that_one_rank_lacks_are_named(rows_of):
    assert rows_of(foreign_steps.more_on_several)["2 ranks"] == Row(
        "2 ranks", "equal", "not compared, because one rank does not return it: seen"
    )


def make_step():
    def inner(rank, world_size, batch):
        return {}

    return inner


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"step": lambda rank, world_size, batch: {}}, "step=<lambda> is a lambda or a function"),
        ({"step": make_step()}, "<locals>.inner is a lambda or a function within a function"),
        ({"step": functools.partial(foreign_steps.ddp, lock=sys)}, "cannot be passed to fresh"),
        ({"step": 3}, "step=3: must be a function of rank, world_size and batch"),
        ({"nproc": 2}, "nproc=2: must be numbers of ranks, at least one of them above 1"),
        ({"nproc": (1,)}, "nproc=(1,): must be numbers of ranks, at least one of them above 1"),
        ({"nproc": (1, 0)}, "nproc=(1, 0): must be numbers of ranks"),
        ({"nproc": (1, 2.0)}, "nproc=(1, 2.0): must be numbers of ranks"),
        ({"tolerance": -1}, "tolerance=-1: must be a number from 0 to 1"),
        ({"tolerance": "small"}, "tolerance='small': must be a number from 0 to 1"),
        ({"timeout": 0}, "timeout=0: must be a number of seconds above 0"),
        ({"timeout": True}, "timeout=True: must be a number of seconds above 0"),
    ],
)
def test_wrong_arguments_are_one_message(arguments, says):
    with pytest.raises(ConfigError) as error:
        verify(**({"step": foreign_steps.ddp} | arguments))
    assert says in str(error.value)
    assert str(error.value).startswith("verify: ")
    assert "\n" not in str(error.value)


def test_batch_that_cannot_be_passed_is_one_message():
    with pytest.raises(ConfigError, match="verify: batch: a generator cannot be passed to fresh"):
        verify(foreign_steps.ddp, batch=(number for number in range(3)))


UNGUARDED = """
import torch
from ddp_lab import verify

def step(rank, world_size, batch):
    return {"weight": torch.ones(2)}

print(verify(step, nproc=(1, 2)))
"""
IMPORTS_MISSING = """
import os, torch
from ddp_lab import verify

if __name__ == "__main__":
    def step(rank, world_size, batch):
        return {"weight": torch.ones(2)}

    print(verify(step, nproc=(1, 2)))
"""


def run_script(text: str, folder, *options: str) -> subprocess.CompletedProcess:
    script = folder / "script.py"
    script.write_text(text)
    return subprocess.run(
        [programs() / "python", *(options or [script])],
        input=text,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("script", "options", "says"),
    [
        (UNGUARDED, (), 'Put the call below `if __name__ == "__main__":`'),
        (IMPORTS_MISSING, (), "fresh processes cannot load the step: AttributeError: Can't get"),
        pytest.param(
            UNGUARDED,
            ("-",),
            "step=step is defined in a notebook or in the standard input",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_script_that_processes_cannot_import_is_one_message(script, options, says, tmp_path):
    ended = run_script(script, tmp_path, *options)
    errors = [line for line in ended.stderr.splitlines() if "verify: " in line]
    assert ended.returncode == 1
    assert len(errors) == 1, ended.stderr
    assert says in errors[0]
    assert ended.stderr.count("Traceback") == 1, "of the script itself"
    assert ended.stdout == ""


def test_no_process_is_left_when_the_step_hangs(tmp_path):
    file = tmp_path / "processes"
    step = functools.partial(foreign_steps.kept, path=str(file))
    report = verify(step, nproc=(1, 2), timeout=3)
    assert report.rows[1].outcome == "failed"
    numbers = {int(number) for line in file.read_text().splitlines() for number in line.split()}
    assert len(numbers) == 4, "three ranks of one server"
    assert not [number for number in numbers if psutil.pid_exists(number)]
