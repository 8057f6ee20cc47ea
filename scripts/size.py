"""Print how large this repository is beside its limits.

python scripts/size.py            the table
python scripts/size.py --check    exit code 1 if a limit is exceeded

A limit is what was reached. It falls when something goes, and rises only with a reason in CONTRIBUTING.md.
Lines are all lines of Python files, comments and docstrings included; in scripts/ shell scripts and TOML tables count, too.
Words are those of README.md and of all pages below docs/ but docs/configuration.md, which is generated; code blocks and tables
count. CHANGELOG.md and CONTRIBUTING.md do not count, and ddp_lab/exercises only in its row.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {  # and the goals
    "lines of ddp_lab/": (18_660, 16_500),
    "files of ddp_lab/": (165, 165),
    "lines of ddp_lab/exercises/": (2_315, 2_000),
    "lines of tests/": (13_960, 11_000),
    "lines of scripts/": (2_000, 2_000),
    "words of README.md and docs/": (18_000, 18_000),
    "words of README.md": (1_200, 1_200),
}


def lines(paths: Iterable[Path]) -> int:
    """Return the number of lines of some files."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def words(paths: Iterable[Path]) -> int:
    """Return the number of words of some files, as `wc -w` counts them."""
    return sum(len(path.read_text().split()) for path in paths)


def sizes(root: Path) -> dict[str, int]:
    """Return the sizes of a tree, under the names of LIMITS."""
    every = list((root / "ddp_lab").rglob("*.py"))
    exercises = [path for path in every if (root / "ddp_lab/exercises") in path.parents]
    package = [path for path in every if path not in exercises]
    pages = [path for path in (root / "docs").rglob("*.md") if path != root / "docs/configuration.md"]
    readme = root / "README.md"
    counts = [
        *(lines(package), len(package), lines(exercises), lines((root / "tests").rglob("*.py"))),
        lines(path for path in (root / "scripts").rglob("*") if path.suffix in (".py", ".sh", ".toml")),
        *(words([readme, *pages]), words([readme])),
    ]
    return dict(zip(LIMITS, counts, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with code 1 if a limit is exceeded")
    arguments = parser.parse_args()
    found = sizes(ROOT)
    exceeded = [name for name, size in found.items() if size > LIMITS[name][0]]
    print(f"{'':30}{'size':>8}{'limit':>8}{'goal':>8}")
    for name, size in found.items():
        print(f"{name:30}{size:>8,}{LIMITS[name][0]:>8,}{LIMITS[name][1]:>8,}{'  exceeded' if name in exceeded else ''}")
    if arguments.check and exceeded:
        sys.exit(f"error: {', '.join(exceeded)}: above the limit; delete or merge before adding, or raise it with a reason")


if __name__ == "__main__":
    main()
