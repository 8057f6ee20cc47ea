"""Run a learner's file on a few processes with gloo, and describe how it went.

Nothing hangs, and no traceback is shown.
"""

import ast
import importlib
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from ddp_lab.exercises.catalog import Exercise
from ddp_lab.exercises.explain import Call
from ddp_lab.exercises.rank import Outcome, Work, run_rank

LIMIT = 6.0  # seconds for all numbers of processes; a solution takes a fraction of a second
GRACE = 1.0  # seconds for the other ranks' outcomes after the first failure
SENDS = {"send", "isend"}  # also the wait for an isend
RECEIVES = {"recv", "irecv"}
ORDER = ["missing", "raised", "wrong", "exited", "waits", "lost"]


def explain_failure(exercise: Exercise, file: Path) -> str | None:
    """Check a learner's file on each number of processes of the exercise.

    Return what is wrong, or None.

    torch is imported already, so that forking takes milliseconds. Nothing may have started threads
    before.
    """
    try:
        source = file.read_bytes()
        ast.parse(source)
    except SyntaxError as error:
        return (
            f"{f'line {error.lineno}' if error.lineno else 'the file'} is not Python: {error.msg}."
        )
    except (OSError, ValueError) as error:
        return f"{file} cannot be read: {error}."

    if any(word in source for word in (b"optim", b"DataParallel", b"autograd.grad")):
        # which these import when first used: seconds, on each of the ranks
        importlib.import_module("torch._dynamo")
    end = time.monotonic() + LIMIT
    for ranks in exercise.check.RANKS:
        outcomes = run_ranks(file, ranks, exercise.check.check, end - time.monotonic())
        if any(outcome.kind != "passed" for outcome in outcomes):
            return f"On {ranks} processes: {explain_outcomes(exercise, outcomes)}"
    return None


def run_ranks(file: Path, ranks: int, work: Work, limit: float = LIMIT) -> list[Outcome]:
    """Run the work on some processes for at most `limit` seconds; return how each rank ended."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(ranks)]
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=run_rank, args=(file, work, rank, store, pipes), daemon=True)
            for rank in range(ranks)
        ]
        try:
            for process, (_, theirs) in zip(processes, pipes, strict=True):
                process.start()
                theirs.close()
            outcomes = receive(
                [cast(Any, receiver) for receiver, _ in pipes], time.monotonic() + limit
            )
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [outcomes.get(rank) or exited(process) for rank, process in enumerate(processes)]


def receive(pipes: list[Connection], end: float) -> dict[int, Outcome]:
    """Return how the ranks have ended, or where they are.

    A rank is missing if its process has ended without a result.
    """
    outcomes = dict[int, Outcome]()
    silent = set(range(len(pipes)))
    asked = False
    while silent:
        ready = wait([pipes[rank] for rank in silent], max(0.0, end - time.monotonic()))
        for rank in [rank for rank in silent if pipes[rank] in ready]:
            silent.remove(rank)
            with suppress(EOFError, OSError):
                outcomes[rank] = pipes[rank].recv()
            if not asked and (rank not in outcomes or outcomes[rank].kind != "passed"):
                end = min(end, time.monotonic() + GRACE)

        if not ready and asked:
            busy = Outcome("waits", "does not respond: it computes without a pause", Call("", 0))
            return outcomes | dict.fromkeys(silent, busy)
        if not ready:
            asked = True
            end = time.monotonic() + 1
            for rank in silent:
                with suppress(OSError):
                    pipes[rank].send("where")
    return outcomes


def exited(process: BaseProcess) -> Outcome:
    """Return how a process ended that has sent no result."""
    code = process.exitcode or 0
    if code == -signal.SIGABRT:
        cause = (
            "gloo does this when the tensor that arrives is larger than expected: are shape and "
            "dtype the same on all ranks?"
        )
        return Outcome("exited", f"the process was aborted; {cause}")
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    else:
        how = f"ended with code {code}, as by os._exit"
    return Outcome("exited", f"the process {how}, without a result.")


def explain_outcomes(exercise: Exercise, outcomes: list[Outcome], limit: float = LIMIT) -> str:
    """Return the most telling failure of the ranks, in words."""
    kind = min((outcome.kind for outcome in outcomes if outcome.kind != "passed"), key=ORDER.index)
    if kind == "waits":
        return explain_waiting(exercise, outcomes, limit)
    rank = next(rank for rank, outcome in enumerate(outcomes) if outcome.kind == kind)
    text = outcomes[rank].text
    return text if kind in ("missing", "wrong") else f"rank {rank}: {text}"


def explain_waiting(exercise: Exercise, outcomes: list[Outcome], limit: float) -> str:
    """Return which rank waits where, and why if the exercise knows."""
    waiting: Mapping[int, Call | None] = {
        rank: outcome.call for rank, outcome in enumerate(outcomes)
    }
    busy = [rank for rank, call in waiting.items() if call and not call.name]
    explain = getattr(exercise.check, "explain_hang", None)
    why = explain(waiting) if explain and not busy else None
    if busy:
        why = (
            f"rank {busy[0]} has not ended within {limit:g} seconds: does a loop never end, or "
            "does it sleep?"
        )
    elif not any(waiting.values()):
        why = (
            "the check did not end, though the functions have returned: run it again when the "
            "machine is less busy."
        )

    lines = [
        f"  rank {rank} {outcome.text if outcome.kind != 'passed' else 'is done'}"
        for rank, outcome in enumerate(outcomes)
    ]
    return "\n".join([why or explain_calls(waiting), *lines])


def explain_calls(waiting: Mapping[int, Call | None]) -> str:
    """Return why ranks wait for each other, as their calls show it."""
    names = {call.name if call else "" for call in waiting.values()}
    if names <= SENDS:
        return (
            "every rank sends and none receives: a send ends when the other rank receives. Let "
            "some ranks receive first, or start the send with isend and wait for it after the recv."
        )
    if names <= RECEIVES:
        return (
            "every rank receives and none sends: a recv ends when the other rank sends. Let some "
            "ranks send first, or start the send with isend before the recv."
        )
    return "the ranks do not make the same calls, so some wait forever."
