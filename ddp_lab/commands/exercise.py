"""Write the mechanisms of distributed training yourself.

They are checked on a few processes of this machine.

ddp-lab exercise list                      the exercises in their order
ddp-lab exercise start ring_all_reduce     write exercises/ring_all_reduce.py, without one function
ddp-lab exercise check ring_all_reduce     run it on 2 to 4 processes, and explain what is wrong
ddp-lab exercise hint ring_all_reduce      a hint; `--number 2` the next one
ddp-lab exercise solution ring_all_reduce  print the reference solution

If the exercise is an all-reduce, `check --speed` then draws its times beside those of the project's
algorithms.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.arguments import Parser, check_folder

if TYPE_CHECKING:
    from ddp_lab.exercises.catalog import Exercise

ACTIONS = ("list", "start", "check", "hint", "solution")
COMMAND = "ddp-lab exercise"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(COMMAND, __doc__)
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("name", nargs="?", help="of the exercise")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("exercises"),
        help="of the learner's files (default: exercises)",
    )
    parser.add_argument("--number", type=int, default=1, help="of the hint (default: 1)")
    parser.add_argument(
        "--speed",
        action="store_true",
        help="with check: also time the learner's all-reduce and draw it",
    )

    namespace = parser.parse_args(arguments)
    if (namespace.name is None) != (namespace.action == "list"):
        parser.error(
            f"{namespace.action}: "
            f"{'takes no name' if namespace.name else 'the name of an exercise is missing'}"
        )

    if namespace.speed and namespace.action != "check":
        parser.error(f"{namespace.action}: takes no --speed; allowed: check")
    return namespace


def main(arguments: list[str]) -> None:
    namespace = parse(arguments)
    from ddp_lab.exercises import catalog

    if namespace.action == "list":
        for number, (name, title) in enumerate(catalog.TITLES.items(), 1):
            print(
                f"{number:>2}  {name:<20} "
                f"{title}{'  (started)' if (namespace.folder / f'{name}.py').exists() else ''}"
            )
        return

    exercise = catalog.load(namespace.name)
    file = namespace.folder / f"{namespace.name}.py"
    if namespace.action == "start":
        start(exercise, file)
    elif namespace.action == "check":
        check(exercise, file, namespace.speed)
    elif namespace.action == "solution":
        print(exercise.solution, end="")
    elif not 1 <= namespace.number <= len(exercise.check.HINTS):
        raise ConfigError(
            f"--number {namespace.number}: {namespace.name} has the hints 1 to "
            f"{len(exercise.check.HINTS)}"
        )
    else:
        print(
            f"hint {namespace.number} of {len(exercise.check.HINTS)}: "
            f"{exercise.check.HINTS[namespace.number - 1]}"
        )


def start(exercise: "Exercise", file: Path) -> None:
    """Write the file in which the learner works.

    Raises:
        ConfigError: it exists, or cannot be written.
    """
    if file.exists():
        raise ConfigError(f"{file}: already exists; continue there, or remove it to start again")
    file.parent.mkdir(exist_ok=True)
    check_folder(file, "--folder")
    for name, text in getattr(exercise.check, "FILES", {}).items():
        further = file.parent / name
        if not further.exists():
            further.parent.mkdir(exist_ok=True)
            further.write_text(text)
    file.write_text(exercise.template())
    print(
        f"{file}: write {' and '.join(exercise.check.WRITE)}, then `{COMMAND} check "
        f"{exercise.name}`"
    )


def check(exercise: "Exercise", file: Path, speed: bool) -> None:
    """Print whether the learner's file is right, and on request how fast it is.

    The exit code is 1 if it is not right.

    Raises:
        ConfigError: there is no such file, or the exercise has no speed.
    """
    from ddp_lab.exercises.catalog import following
    from ddp_lab.exercises.processes import explain_failure
    from ddp_lab.exercises.speed import LEARNERS, compare

    if speed and exercise.name not in LEARNERS:
        raise ConfigError(
            f"--speed: {exercise.name} is no all-reduce; allowed for {', '.join(LEARNERS)}. Leave "
            "--speed out"
        )
    if not file.is_file():
        raise ConfigError(
            f"{file}: does not exist; write it with `{COMMAND} start {exercise.name}`"
        )

    if speed:
        check_folder(file.with_suffix(".png"), "--speed")
    wrong = explain_failure(exercise, file.resolve())
    if wrong:
        print(f"{exercise.name}: not yet right. {wrong}\n\nA hint: {COMMAND} hint {exercise.name}")
        sys.exit(1)

    processes = " and ".join(map(str, exercise.check.RANKS))
    then = following(exercise.name)
    print(
        f"{exercise.name}: right, on {processes} "
        f"processes.{f' Next: {COMMAND} start {then}' if then else ''}"
    )
    slow = compare(exercise, file.resolve(), file.with_suffix(".png")) if speed else None
    if slow:
        print(f"Its speed could not be measured. {slow}")
        sys.exit(1)
