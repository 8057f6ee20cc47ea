"""Which slow tests a run of the gate takes (support/parts.py)."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launches import ROOT
from parts import divide, files_of_part, read_part

FILES = ["test_tutorial.py", "test_equivalence.py", *(f"test_{i}.py" for i in range(9))]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_file_is_in_one_part_and_the_matrix_in_all(count):
    parts = [files_of_part(FILES, (number, count)) for number in range(1, count + 1)]
    for name in FILES:
        times = sum(name in part for part in parts)
        assert times == (count if name == "test_equivalence.py" else 1), name
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_longest_files_are_in_different_parts():
    longest = "test_tutorial.py", "test_0.py", "test_1.py", "test_2.py"
    for number, name in enumerate(longest, 1):
        assert {*longest} & files_of_part(FILES, (number, 4)) == {name}


def test_part_is_read():
    assert read_part("2/4") == (2, 4)


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "a/b", "1/4/2", "-1/4"])
def test_wrong_part_is_refused(text):
    with pytest.raises(pytest.UsageError, match=f"--part {text}: must be NUMBER/COUNT"):
        read_part(text)


class Item:
    """What `divide` uses of a test: its file and its marks."""

    def __init__(self, name: str, *marks: str):
        self.path = Path(name)
        self.marks = marks

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


def test_fast_tests_are_in_every_part_and_slow_ones_in_that_of_their_file():
    fast = Item("test_b.py")
    first = Item("test_a.py", "slow")
    second = Item("test_b.py", "slow")
    extra = Item("test_c.py", "slow", "extra")  # of a file without other slow tests
    items: Any = [first, extra, fast, second]
    assert divide(items, (1, 2)) == ([first, fast], [extra, second])
    assert divide(items, (2, 2)) == ([fast, second], [first, extra])


@pytest.mark.slow
def test_option_leaves_out_the_slow_tests_of_other_parts():
    files = ["tests/launchers/test_waiting.py", "tests/launchers/test_last_wait.py"]
    collected = []
    for options in ([], ["--part", "1/2"], ["--part", "2/2"]):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options, *files]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        collected.append({line for line in done.stdout.splitlines() if "::" in line})
    every, first, second = collected
    assert first | second == every
    assert first != every != second
    assert any("test_last_wait" in name for name in first & second), "fast tests"
