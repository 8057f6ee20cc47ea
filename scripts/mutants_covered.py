"""Which lines each test file executes, in its pytest process and all that this one starts.

Not which lines each test executes, because the tests of a file share worlds and launches: only the
first one executes them. Ranks are forked from a server and end by os._exit, for which coverage has
patches. It is started by a sitecustomize.py on the PYTHONPATH, so nothing is written into the
environment.
"""

import ast
import contextlib
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import coverage
import psutil
from coverage.exceptions import CoverageException

MARK = "DDP_LAB_MUTANT"  # in the environment of every process that a test file starts
NO_TESTS = 5  # the exit code of pytest for a file that has only slow tests
SETTINGS = """[run]
data_file = {data}
parallel = true
patch = subprocess, fork, _exit
include = {tree}/ddp_lab/*
disable_warnings = no-data-collected, module-not-measured, module-not-imported, already-imported
"""
STARTER = """import sys

sys.path.append({folder!r})
import coverage

coverage.process_startup()
"""


class Outcome(NamedTuple):
    """How pytest ended."""

    code: int | None  # its exit code; None if it exceeded its time limit
    seconds: float
    failed: str  # the first test that failed

    @property
    def passes(self) -> bool:
        return self.code == 0


def run_tests(
    tree: Path,
    test: str,
    limit: float,
    added: dict[str, str] | None = None,
    *,
    stop: bool = True,
) -> Outcome:
    """Run a test file of a tree, and end every process that it leaves.

    Args:
        tree: The root of the tree.
        test: The file, from the root.
        limit: Seconds.
        added: Further environment variables. `PYTHONPATH` is added to the tree's.
        stop: Whether to stop at the first failure.
    """
    added = added or {}
    mark = uuid.uuid4().hex
    hidden = ("PYTEST_", "COVERAGE_", "DDP_LAB_TESTS_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {"OMP_NUM_THREADS": "1", MARK: mark, **added}
    search = [str(tree), added.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, search))
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", *(["-x"] if stop else [])]
    folder = tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True)
    with folder as temporary, tempfile.TemporaryFile() as output:
        started = time.monotonic()
        pytest = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, test],
            cwd=tree,
            env=environment | {"TMPDIR": temporary},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = pytest.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            seconds = time.monotonic() - started
            end_all(mark)
            pytest.wait()
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    return Outcome(code, round(seconds, 1), first_failed(lines))


def first_failed(lines: list[str]) -> str:
    """Return the first failed test in the summary of pytest, with its parameters, or ""."""
    summary = (line.split(" ", 1) for line in lines if line.startswith(("FAILED ", "ERROR tests")))
    return next((rest.split(" - ")[0] for _, rest in summary), "")


def end_all(mark: str) -> None:
    """Kill the processes whose environment has a mark, also those in sessions of their own."""
    while marked := [each for each in psutil.process_iter() if has(each, mark)]:
        for process in marked:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(marked, timeout=10)


def has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Covered(NamedTuple):
    """What a test file executes, without an error in the code."""

    test: str
    passes: bool  # without coverage, if it fails with it; False if it has only slow tests
    seconds: float
    lines: dict[str, list[int]]  # of each file of ddp_lab


def measure(tree: Path, test: str, folder: Path, limit: float) -> Covered:
    """Run a test file under coverage.

    Args:
        tree: The root of the tree, which is not changed.
        test: The file, from the root.
        folder: For what coverage writes; it is deleted.
        limit: Seconds.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = folder / "settings.ini"
    settings.write_text(SETTINGS.format(data=folder / "lines", tree=tree))
    package = str(Path(inspect.getfile(coverage)).parent.parent)
    (folder / "sitecustomize.py").write_text(STARTER.format(folder=package))
    added = {"PYTHONPATH": str(folder), "COVERAGE_PROCESS_START": str(settings)}
    outcome = run_tests(tree, test, limit, added, stop=False)
    lines: dict[str, set[int]] = {}
    for path in sorted(folder.glob("lines.*")):
        for file, executed in read_lines(path).items():
            lines.setdefault(str(Path(file).relative_to(tree)), set()).update(executed)
    shutil.rmtree(folder)
    if outcome.code not in (0, NO_TESTS):
        outcome = run_tests(tree, test, limit)
    executed = {file: sorted(each) for file, each in lines.items()}
    return Covered(test, outcome.passes, outcome.seconds, executed)


def read_lines(path: Path) -> dict[str, list[int]]:
    """Return the lines of each file that a process executed; none if it was killed in writing."""
    data = coverage.CoverageData(str(path))
    try:
        data.read()
        return {file: data.lines(file) or [] for file in data.measured_files()}
    except CoverageException:
        return {}


def files_with_tests(tree: Path, under: str) -> list[str]:
    """Return the test files of a tree in a folder that have a test."""
    paths = sorted((tree / under).rglob("test_*.py")) if (tree / under).is_dir() else [tree / under]
    return [str(path.relative_to(tree)) for path in paths if has_tests(path)]


def has_tests(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text()))
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    return any(name.startswith("test_") for name in names)


def nearness(file: str) -> Callable[[Covered], tuple[bool, bool, float]]:
    """Return the key that sorts test files for a file: its own, its folder's, the fastest."""
    mutated = Path(file)

    def key(test: Covered) -> tuple[bool, bool, float]:
        path = Path(test.test)
        # of ddp_lab/tasks/tokens.py and tests/tasks/...
        is_near = path.parts[1] == mutated.parts[1]
        is_own = is_near and mutated.stem in path.stem
        return not is_own, not is_near, test.seconds

    return key
