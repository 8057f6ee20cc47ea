"""Plant the errors of planted_errors.toml, one at a time, and report which survive their test.

Each is planted in a copy of this tree.

python scripts/planted_errors.py              all errors
python scripts/planted_errors.py loop         those whose entry contains this

An entry is one replacement in one file, `old` by `new`, with `test`, the arguments of pytest for
the least expensive tests that must fail because of it. Of these the slow ones are run only if no
fast one fails. All that are run for an error must pass without it. Exit code 0: they do, and every
error makes one fail.
"""

import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE: dict[str, dict[str, dict[str, str]]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text()
)
ERRORS = [
    {"file": file, "name": name, "new": "", **error}
    for file, errors in TABLE.items()
    for name, error in errors.items()
]
LIMIT = 300  # seconds for the tests of an error
PASSED = 0  # exit codes of pytest
FAILED = 1
NO_TESTS = 5
SUITES = ("not slow", "slow and not extra")  # expressions of pytest's -m, the quickest first
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "runs", "data", "*.egg-info", "__pycache__", ".*_cache"
)


def planted(error: dict[str, str], root: Path) -> str:
    """Return the text of the file of a tree with the error in it.

    Raises:
        ValueError: the text to replace is not in the file exactly once.
    """
    text = (root / error["file"]).read_text()
    if text.count(error["old"]) != 1:
        raise ValueError(
            f"{error['file']} has {error['old']!r} {text.count(error['old'])} times: update or "
            "remove the entry"
        )
    return text.replace(error["old"], error["new"])


def outcome(test: str, suite: str, error: dict[str, str] | None = None) -> int | None:
    """Return pytest's exit code in a copy of the tree, with or without an error; None: too slow."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(
            ROOT,
            tree,
            symlinks=True,
            ignore=lambda path, names: LEFT_OUT(path, names) if path == str(ROOT) else [],
        )
        if error:
            (tree / error["file"]).write_text(planted(error, tree))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-m",
            suite,
            "-p",
            "no:cacheprovider",
            *shlex.split(test),
        ]
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": str(tree),
        }
        try:
            return subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, timeout=LIMIT
            ).returncode
        except subprocess.TimeoutExpired:
            return None


def suite_that_fails(error: dict[str, str]) -> str | None:
    """Return the first suite whose tests of an error fail because of it; None: none does."""
    for suite in SUITES:
        if outcome(error["test"], suite, error) == FAILED:
            return suite
    return None


def main() -> None:
    chosen = [error for error in ERRORS if all(word in str(error) for word in sys.argv[1:])]
    survived = 0
    needed: dict[tuple[str, str], None] = {}
    for error in chosen:
        suite = suite_that_fails(error)
        needed[error["test"], suite or SUITES[0]] = None
        survived += suite is None
        print(
            f"{'caught  ' if suite else 'SURVIVED'} {error['file']}: {error['name']} "
            f"({error['test']})",
            flush=True,
        )
    wrong = [test for test, suite in needed if outcome(test, suite) not in (PASSED, NO_TESTS)]
    print(
        f"{len(chosen) - survived} of {len(chosen)} errors are caught; not passing without one: "
        f"{wrong}"
    )
    sys.exit(1 if wrong or survived or not chosen else 0)


if __name__ == "__main__":
    main()
