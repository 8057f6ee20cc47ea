"""Make small errors in the code, one at a time, and report which no test notices.

python scripts/mutants.py                                  200 mutants; hours
python scripts/mutants.py --only ddp_lab/tasks --sample 6 --tests tests/tasks

Cosmic Ray makes the mutants (mutants_made.py). What runs them is here, because neither it nor
mutmut draws a sample, nor chooses tests for a line that only forked ranks execute. Each test file
runs once under coverage (mutants_covered.py). Each mutant then meets the test files that execute
its line: the one named for its file, those of its folder, the fastest, until one fails. A mutant
that makes a test file exceed its time limit is killed, too.

All of it happens in copies of the tree as the first call found it. The results are lines of JSON
in the folder `--results`, and a later call with the same folder does what is missing there: after
an interruption, for a larger `--sample`, or for survivors with more `--files`. Ctrl-C lets the
mutants that are running finish. Delete the folder after a change to the code.

Exit code 0: at least 90 % of the mutants are killed; 1: fewer; 2: there is nothing to mutate.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.mutants_covered import Covered, files_with_tests, measure, nearness, run_tests  # noqa: E402
from scripts.mutants_made import Mutant, sample  # noqa: E402

GOAL = 0.9
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "runs", "data", "*.egg-info", ".*_cache")
LIMIT = 1200  # seconds for a test file without an error
SPARE = 60  # seconds that a mutant's test file may take in addition to three times its own
STATUSES = ("killed", "timed out", "survived", "not covered")
Item = TypeVar("Item")


class Record:
    """Rows of a JSON-lines file, which is written row by row."""

    def __init__(self, path: Path):
        self.path = path
        self.lock = Lock()
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # The last row may have been interrupted.
        complete = [line for line in lines if line.endswith("\n")]
        if complete != lines:
            path.write_text("".join(complete))
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in complete]

    def append(self, row: dict[str, Any]) -> None:
        with self.lock, self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            self.rows.append(row)


def arguments(command_line: list[str] | None) -> argparse.Namespace:
    description = "Make small errors in the code and report which no test notices."
    parser = argparse.ArgumentParser(description=description)
    results = ROOT / "runs" / "mutants"
    parser.add_argument("--sample", type=int, default=200, help="the number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of mutants")
    parser.add_argument("--only", default="ddp_lab", help="the folder or file to mutate")
    parser.add_argument("--tests", default="tests", help="the folder or file of tests")
    parser.add_argument(
        "--files", type=int, default=4, help="test files that a mutant meets at most"
    )
    seconds = "seconds that these files take at most, after the first one"
    parser.add_argument("--seconds", type=float, default=150, help=seconds)
    parser.add_argument("--jobs", type=int, default=2, help="test files that run at a time")
    parser.add_argument("--results", type=Path, default=results, help="the folder of the results")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    return parser.parse_args(command_line)


def copy(source: Path, target: Path) -> None:
    """Copy a tree without what its tests do not need."""

    def left_out(path: str, names: list[str]) -> set[str]:
        return LEFT_OUT(path, names) if path == str(source) else set()

    shutil.copytree(source, target, symlinks=True, ignore=left_out)


def in_parallel(jobs: int, function: Callable[[Item], None], items: list[Item]) -> None:
    """Call a function for each item, and stop at the first error."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def cover(options: argparse.Namespace, tree: Path) -> list[Covered]:
    """Return what each test file executes, from the results or by running it."""
    record = Record(options.results / "tests.jsonl")
    done = {row["test"] for row in record.rows}
    wanted = files_with_tests(tree, options.tests)
    missing = [test for test in wanted if test not in done]

    def run(test: str) -> None:
        folder = options.results / "coverage" / test.replace("/", "-")
        covered = measure(tree, test, folder, LIMIT)
        record.append(covered._asdict())
        left_out = ", left out: it fails without an error, or has only slow tests"
        print(f"{test}: {covered.seconds} s{'' if covered.passes else left_out}", flush=True)

    in_parallel(options.jobs, run, missing)
    return [Covered(**row) for row in record.rows if row["test"] in wanted]


def chosen(mutant: Mutant, tests: list[Covered], options: argparse.Namespace) -> list[Covered]:
    """Return the test files that a mutant meets, in order."""
    first, last = mutant.place.statement

    def covers(test: Covered) -> bool:
        lines = test.lines.get(mutant.place.file, [])
        return any(first <= line <= last for line in lines)

    covering = [test for test in tests if test.passes and covers(test)]
    covering.sort(key=nearness(mutant.place.file))
    result = covering[:1]
    seconds = 0.0
    for test in covering[1:]:
        seconds += test.seconds
        if seconds > options.seconds or len(result) >= options.files:
            break
        result.append(test)
    return result


def meet(mutant: Mutant, tests: list[Covered], tree: Path) -> dict[str, Any]:
    """Run test files against a mutant in a copy of a tree, and return its row of the results."""
    status = "survived"
    by = ""
    seconds = 0.0
    met: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copied = Path(folder).resolve() / "tree"
        copy(tree, copied)
        (copied / mutant.place.file).write_text(mutant.text)
        for test in tests:
            outcome = run_tests(copied, test.test, 3 * test.seconds + SPARE)
            seconds += outcome.seconds
            met.append(test.test)
            if not outcome.passes:
                status = "timed out" if outcome.code is None else "killed"
                by = outcome.failed or test.test
                break
    return {
        "mutant": mutant.name,
        "status": status,
        "by": by,
        "seconds": round(seconds, 1),
        "tests": met,
        "diff": mutant.diff,
    }


def run_mutants(options: argparse.Namespace, tree: Path) -> list[tuple[Mutant, str]]:
    """Return the mutants of the sample with their statuses, from results or by running tests."""
    tests = cover(options, tree)
    mutants = sample(tree, options.only, options.sample, options.seed)
    record = Record(options.results / "mutants.jsonl")

    def earlier(mutant: Mutant) -> list[dict[str, Any]]:
        return [row for row in record.rows if row["mutant"] == mutant.name]

    def missing(mutant: Mutant) -> list[Covered]:
        rows = earlier(mutant)
        met = {test for row in rows for test in row["tests"]}
        if any(row["status"] != "survived" for row in rows):
            return []
        return [test for test in chosen(mutant, tests, options) if test.test not in met]

    def run(mutant: Mutant) -> None:
        row = meet(mutant, missing(mutant), tree)
        record.append(row)
        by = f" by {row['by']}" if row["by"] else ""
        print(f"{row['status']}{by}, {row['seconds']:.0f} s: {mutant.name}", flush=True)

    in_parallel(options.jobs, run, [mutant for mutant in mutants if missing(mutant)])
    statuses = {mutant.name: [row["status"] for row in earlier(mutant)] for mutant in mutants}
    return [(mutant, (statuses[mutant.name] or ["not covered"])[-1]) for mutant in mutants]


def table(results: list[tuple[Mutant, str]]) -> str:
    """Return the numbers of mutants by folder and status."""
    folders: Counter[tuple[str, str]] = Counter()
    for mutant, status in results:
        folder = Path(mutant.place.file).parents[-3]
        folders[str(folder), status] += 1
    names = sorted({folder for folder, _ in folders})
    rows = [["folder", "mutants", *STATUSES]]
    for name in names:
        counts = [folders[name, status] for status in STATUSES]
        rows.append([name, str(sum(counts)), *map(str, counts)])
    totals = Counter(status for _, status in results)
    rows.append(["all", str(len(results)), *(str(totals[status]) for status in STATUSES)])
    return "\n".join(f"{row[0]:24}" + "".join(f"{cell:>13}" for cell in row[1:]) for row in rows)


def main(command_line: list[str] | None = None) -> int:
    options = arguments(command_line)
    options.root = options.root.resolve()
    options.results = options.results.resolve()
    tree = options.results / "tree"
    if not tree.exists():
        partial = options.results / f"tree.{os.getpid()}"
        copy(options.root, partial)
        partial.rename(tree)
    results = run_mutants(options, tree)
    if not results:
        problem = "has no line that can be mutated; use a folder or file of ddp_lab"
        print(f"--only {options.only} {problem}", file=sys.stderr)
        return 2
    for mutant, status in results:
        if status in ("survived", "not covered"):
            print(f"\n{status}: {mutant.name}\n{mutant.diff}")
    killed = sum(status in ("killed", "timed out") for _, status in results)
    print(f"\n{table(results)}\n{killed / len(results):.0%} are killed")
    return 0 if killed >= GOAL * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
