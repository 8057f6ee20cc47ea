"""What each rank is doing, on request: the stacks of its threads, and its last collective.

run directory/stacks/request        the number of the last request, which `ddp-lab watch` writes
run directory/stacks/NUMBER/        the answers to it, a file per rank

The watchdog's thread of each rank answers, even while the main thread waits or hangs. It cannot
while code in C holds the interpreter, or the process is suspended.
"""

import faulthandler
import re
import tempfile
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from ddp_lab.resilience.heartbeats import Heartbeat
from ddp_lab.resilience.run_directory import REQUEST, STACKS
from ddp_lab.world.process import replace_text

# by the time, so that the newest one is the last by name
NUMBER = re.compile(r"\d{8}-\d{6}-\d{6}")


def request(run_dir: Path) -> str:
    """Ask the ranks of a run for their stacks; return the number of the request.

    Raises:
        OSError: the run directory cannot be written.
    """
    number = f"{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder = run_dir / STACKS
    folder.mkdir(exist_ok=True)
    replace_text(folder / REQUEST, number)
    return number


def requested(run_dir: Path) -> str | None:
    """Return the number of the last request; None if there was none."""
    with suppress(OSError):
        number = (run_dir / STACKS / REQUEST).read_text(errors="replace")
        # it names a folder, so a file of somebody else must not lead out of the run directory
        return number if NUMBER.fullmatch(number) else None
    return None


def answers(run_dir: Path, number: str) -> dict[int, str]:
    """Return the answers to a request, by rank."""
    texts: dict[int, str] = {}
    for path in (run_dir / STACKS / number).glob("rank_*.txt"):
        with suppress(OSError, ValueError):
            texts[int(path.stem.removeprefix("rank_"))] = path.read_text(errors="replace")
    return dict(sorted(texts.items()))


def answer(run_dir: Path, record: Heartbeat, main: int) -> None:
    """Write what this rank is doing, as an answer to the last request.

    A disk that is full, or a directory that was removed, leaves the request without an answer.

    Args:
        run_dir: the run directory.
        record: the heartbeat of this rank.
        main: the identifier of its main thread.
    """
    with suppress(OSError):
        number = requested(run_dir)
        if number is None:
            return
        folder = run_dir / STACKS / number
        folder.mkdir(exist_ok=True)
        replace_text(folder / f"rank_{record['rank']}.txt", describe(record, main))


def describe(record: Heartbeat, main: int) -> str:
    """Return what this rank is doing, as a text. Arguments as in `answer`."""
    seconds = time.time() - record["since"]
    place = f"rank {record['rank']} on {record['host']} (pid {record['pid']})"
    position = f"epoch {record['epoch']}, step {record['step']}"
    return (
        f"{place}, {position}, {record['doing']} for {seconds:.1f} s\n"
        f"last collective: {describe_last_call()}\n\n"
        f"{stacks_of_threads(main)}"
    )


def describe_last_call() -> str:
    """Return the last collective of this rank with its number, and whether it waits in it."""
    from ddp_lab.resilience import flight_recorder

    try:
        last = flight_recorder.last_call()
    except Exception as error:  # of torch's recorder: the stacks are worth more
        return f"unknown: torch's Flight Recorder failed ({type(error).__name__}: {error})"
    if last is None:
        return "none is recorded"
    return f"{last.text}, {'which has ended' if last.has_ended else 'which has not ended'}"


def stacks_of_threads(main: int) -> str:
    """Return the stacks of all threads as faulthandler writes them, the main thread's first.

    faulthandler reads no source files, which may be on a file system that hangs.
    """
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        threads = file.read().strip().split("\n\n")
    return "\n\n".join(sorted(threads, key=lambda text: f"{main:x} " not in text)) + "\n"
