"""Plant the errors of planted_errors.toml, one at a time, and report which survive their test.

Each is planted in a copy of this tree.

python scripts/planted_errors.py              all errors
python scripts/planted_errors.py loop         those whose entry contains this

An entry is one replacement in one file, `old` by `new`, with `test`, the arguments of pytest for
the least expensive tests that must fail because of it: the fast ones of these, or all if none is
fast. They are run without the error, too. Exit code 0: all pass there, and every error makes one
fail.
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
NO_TESTS = 5  # pytest's exit code
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


def outcome(test: str, error: dict[str, str] | None = None) -> int | None:
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
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += shlex.split(test)
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": str(tree),
        }
        try:
            for selection in (["-m", "not slow"], []):
                code = subprocess.run(
                    [*command, *selection],
                    cwd=tree,
                    env=environment,
                    capture_output=True,
                    timeout=LIMIT,
                ).returncode
                if code != NO_TESTS:
                    break
            return code
        except subprocess.TimeoutExpired:
            return None


def main() -> None:
    chosen = [error for error in ERRORS if all(word in str(error) for word in sys.argv[1:])]
    wrong = [
        test for test in dict.fromkeys(error["test"] for error in chosen) if outcome(test) != 0
    ]
    survived = 0
    for error in chosen:
        caught = outcome(error["test"], error) == 1
        survived += not caught
        print(
            f"{'caught  ' if caught else 'SURVIVED'} {error['file']}: {error['name']} "
            f"({error['test']})",
            flush=True,
        )
    print(
        f"{len(chosen) - survived} of {len(chosen)} errors are caught; not passing without one: "
        f"{wrong}"
    )
    sys.exit(1 if wrong or survived or not chosen else 0)


if __name__ == "__main__":
    main()
