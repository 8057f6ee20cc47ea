"""`ddp-lab exercise`, as a learner uses it."""

import os
import subprocess
import sys

import pytest
from launches import ROOT

from ddp_lab.exercises.catalog import load


def run(folder, *arguments):
    command = [sys.executable, "-m", "ddp_lab", "exercise", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, env=environment)
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr


def test_exercise_from_the_list_to_the_right_solution(tmp_path):
    assert "split_batch" in run(tmp_path, "list")[1]
    assert run(tmp_path, "start", "split_batch")[0] == 0
    assert "(started)" in run(tmp_path, "list")[1]
    code, text = run(tmp_path, "start", "split_batch")
    assert code == 2
    assert "already exists" in text
    code, text = run(tmp_path, "check", "split_batch")
    assert code == 1
    assert "still raises NotImplementedError" in text
    assert load("split_batch").check.HINTS[1] in run(tmp_path, "hint", "split_batch", "--number", "2")[1]
    solution = run(tmp_path, "solution", "split_batch")[1]
    (tmp_path / "exercises" / "split_batch.py").write_text(solution)
    code, text = run(tmp_path, "check", "split_batch")
    assert code == 0
    assert "right, on 2 and 3 processes" in text
    assert run(tmp_path, "start", "split_batch", "--folder", "mine")[0] == 0
    assert "still raises" in run(tmp_path, "check", "split_batch", "--folder", "mine")[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "split_batch"], "does not exist; write it with"),
        (["start", "sort"], "there is no such exercise; allowed: split_batch"),
        (["hint", "split_batch", "--number", "9"], "has the hints 1 to"),
        (["check"], "the name of an exercise is missing"),
        (["list", "split_batch"], "takes no name"),
    ],
)
def test_mistakes_are_one_message_with_exit_code_2(arguments, says, tmp_path):
    code, text = run(tmp_path, *arguments)
    assert code == 2
    assert says in text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("return global_batch[", "line 26 is not Python"),
        ("return global_batch.no()", "line 26, `return global_batch.no()`, raises AttributeError"),
        ("import sys; sys.exit()", "raises SystemExit"),
        ("import os; os._exit(0)", "the process ended with code 0"),
        ("while True: pass", "is still busy at line 26"),
        ("import os; os.abort()", "the process was aborted"),
        ("global_batch[0] = 0; return global_batch[rank::world_size]", "local_batch changes its argument 1"),
        ("return global_batch[rank::world_size].float()", "expected torch.int64"),
    ],
)
def test_broken_solutions_are_explained_without_a_traceback(line, says, tmp_path):
    (tmp_path / "exercises").mkdir()
    source = load("split_batch").solution.replace("return global_batch[rank::world_size]", line)
    (tmp_path / "exercises" / "split_batch.py").write_text(source)
    code, text = run(tmp_path, "check", "split_batch")
    assert code == 1
    assert says in text
