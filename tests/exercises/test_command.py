"""`ddp-lab exercise`, as a learner uses it."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from launches import ROOT, launch
from warm import programs

from ddp_lab.commands import exercise
from ddp_lab.exercises import speed
from ddp_lab.exercises.catalog import load


def check(folder: Path, line: str) -> tuple[int, str]:
    """Check a solution in a process without autograd, after which ranks cannot be forked."""
    code, text = launch(f"ddp-lab exercise check {line}", cwd=folder)
    assert "Traceback" not in text
    return code, text


def learners(name: str, folder: Path, old: str = "", new: str = "") -> Path:
    """Write a learner's file: the reference solution with a part replaced."""
    file = folder / "exercises" / f"{name}.py"
    file.parent.mkdir(exist_ok=True)
    source = load(name).solution
    assert old in source
    file.write_text(source.replace(old, new))
    return file


@pytest.fixture
def exercise_command(tmp_path, monkeypatch, command):
    """Return a function that runs the command in a new folder of the learner's."""
    monkeypatch.chdir(tmp_path)
    return lambda line: command(exercise.main, *line.split())


@pytest.mark.covers("exercise --folder", "exercise --number")
def test_exercise_from_the_list_to_the_right_solution(exercise_command, tmp_path):
    assert "split_batch" in exercise_command("list")[1]
    assert exercise_command("start split_batch")[0] == 0
    assert "(started)" in exercise_command("list")[1]
    code, _, errors = exercise_command("start split_batch")
    assert (code, "already exists" in errors) == (2, True)
    code, text = check(tmp_path, "split_batch")
    assert (code, "still raises NotImplementedError" in text) == (1, True)
    assert load("split_batch").check.HINTS[1] in exercise_command("hint split_batch --number 2")[1]
    (tmp_path / "exercises" / "split_batch.py").write_text(
        exercise_command("solution split_batch")[1]
    )
    code, text = check(tmp_path, "split_batch")
    assert (code, "right, on 2 and 3 processes" in text) == (0, True)
    assert exercise_command("start split_batch --folder mine")[0] == 0
    assert "still raises" in check(tmp_path, "split_batch --folder mine")[1]


def test_exercise_about_programs_comes_with_them(exercise_command, tmp_path):
    code, text, _ = exercise_command("start spot_the_bug")
    assert (code, "write wrong_lines" in text) == (0, True)
    programs = list((tmp_path / "exercises/museum").glob("*.py"))
    assert len(programs) == 16
    assert all("verify(step, make_batch())" in path.read_text() for path in programs)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("check split_batch", "does not exist; write it with"),
        ("start sort", "there is no such exercise; allowed: split_batch"),
        ("hint split_batch --number 9", "has the hints 1 to"),
        ("check", "the name of an exercise is missing"),
        ("list split_batch", "takes no name"),
        (
            "check overlap --speed",
            "overlap is no all-reduce; allowed for star_all_reduce, ring_all_reduce, buckets",
        ),
        ("start buckets --speed", "start: takes no --speed; allowed: check"),
    ],
)
def test_mistakes_are_one_message_with_exit_code_2(line, says, exercise_command):
    code, output, errors = exercise_command(line)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert says in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("return global_batch[", "line 27 is not Python"),
        ("return global_batch.no()", "line 27, `return global_batch.no()`, raises AttributeError"),
        ("import sys; sys.exit()", "raises SystemExit"),
        ("import os; os._exit(0)", "the process ended with code 0"),
        ("while True: pass", "is still busy at line 27"),
        ("sum(range(10**12))", "does not respond: it computes without a pause"),
        ("import os; os.abort()", "the process was aborted"),
        (
            "global_batch[0] = 0; return global_batch[rank::world_size]",
            "local_batch changes its argument 1",
        ),
        ("return global_batch[rank::world_size].float()", "expected torch.int64"),
    ],
)
def test_broken_solutions_are_explained_without_a_traceback(line, says, tmp_path):
    learners("split_batch", tmp_path, "return global_batch[rank::world_size]", line)
    code, text = check(tmp_path, "split_batch")
    assert code == 1
    assert says in text


@pytest.mark.slow
@pytest.mark.covers("exercise --speed")
def test_speed_leaves_out_the_sizes_for_which_a_solution_is_too_slow(tmp_path):
    slow = "chunks = list("
    learners(
        "ring_all_reduce",
        tmp_path,
        slow,
        f"__import__('time').sleep(0.3 * (len(tensor) > 100)); {slow}",
    )
    code, text = check(tmp_path, "ring_all_reduce --speed")
    assert code == 0
    assert "right, on 2 and 3 and 4 processes" in text
    (yours,) = [
        float(line.split()[1]) for line in text.splitlines() if line.split()[:1] == ["4,096"]
    ]
    assert yours > 300
    assert ["bytes", "yours", *speed.PROJECT] in [line.split() for line in text.splitlines()]
    assert "so these sizes are left out" in text
    assert "exercises/ring_all_reduce.png" in text
    assert (tmp_path / "exercises" / "ring_all_reduce.png").exists()


def test_speed_of_a_solution_that_fails_on_large_tensors_is_explained(tmp_path):
    learners("buckets", tmp_path, "flat = torch.cat(", "assert limit < 1000; flat = torch.cat(")
    code, text = check(tmp_path, "buckets --speed")
    assert code == 1
    assert "right, on 2 and 3 processes" in text
    assert "Its speed could not be measured. rank 0: line " in text
    assert "raises AssertionError" in text
    assert not (tmp_path / "exercises" / "buckets.png").exists()


def test_loop_of_the_teachers_page_marks_every_student(tmp_path):
    (loop,) = re.findall("```bash\n(.*?)```", (ROOT / "docs/teaching.md").read_text(), re.DOTALL)
    for student in ("ada", "bob"):
        for name in ("split_batch", "ring_all_reduce"):
            source = (
                load(name).template()
                if (student, name) == ("bob", "ring_all_reduce")
                else load(name).solution
            )
            file = tmp_path / "submissions" / student / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
    environment = os.environ | {"PATH": f"{programs()}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", loop],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    marks = {
        line.split(" ", 1)[0].removeprefix("submissions/"): line.split(" ", 1)[1]
        for line in done.stdout.splitlines()
    }
    ring = "ring_all_reduce"
    assert marks == {
        "ada/split_batch": "right",
        f"ada/{ring}": "right",
        "bob/split_batch": "right",
        f"bob/{ring}": "not yet",
    }
    assert "still raises" in (tmp_path / "submissions" / "bob" / f"{ring}.txt").read_text()


def test_picture_that_cannot_be_written_is_refused_only_with_speed(exercise_command, tmp_path):
    for name in ("ring_all_reduce", "split_batch"):
        learners(name, tmp_path)
        (tmp_path / "exercises" / f"{name}.png").mkdir()
    code, output, errors = exercise_command("check ring_all_reduce --speed")
    assert (code, output) == (2, "")
    place = "exercises/ring_all_reduce.png"
    assert errors == f"error: --speed {place}: cannot be written: it is a directory\n"
    code, text = check(tmp_path, "split_batch")
    assert (code, "right, on 2 and 3 processes" in text) == (0, True)
