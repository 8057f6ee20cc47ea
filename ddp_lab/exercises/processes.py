"""Run a learner's file on a few processes with gloo, and say in words how it went; nothing hangs, and no traceback is shown."""

import ast
import importlib
import linecache
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from ddp_lab.exercises.catalog import Exercise
from ddp_lab.exercises.explain import Call, Wrong, of_all_ranks

LIMIT = 6.0  # seconds for all numbers of processes; a solution takes a fraction of a second
GRACE = 1.0  # seconds for the other ranks' outcomes after the first failure
LOST = ("Connection closed", "Connection reset", "Broken pipe")  # gloo's errors on a rank whose peer has ended


class Outcome(NamedTuple):
    """How a rank ended.

    Attributes:
        kind: passed; or, the most telling first: missing (not written yet), raised, wrong, lost (another rank ended), exited,
            waits.
        text: the explanation.
        call: for `waits`, the call in which the rank waits; without a name if it is busy.
        result: for `passed`, what the work returned.
    """

    kind: str
    text: str = ""
    call: Call | None = None
    result: Any = None


Work = Callable[[ModuleType, list[Call]], Any]  # with the learner's module and its calls, on a rank of an open group
ORDER = ["missing", "raised", "wrong", "exited", "waits", "lost"]


def explain_failure(exercise: Exercise, file: Path) -> str | None:
    """Check a learner's file on each number of processes of the exercise. Return what is wrong, or None.

    torch is imported already, so that forking takes milliseconds. Nothing may have started threads before.
    """
    try:
        source = file.read_bytes()
        ast.parse(source)
    except SyntaxError as error:
        return f"{f'line {error.lineno}' if error.lineno else 'the file'} is not Python: {error.msg}."
    except (OSError, ValueError) as error:
        return f"{file} cannot be read: {error}."
    if any(word in source for word in (b"optim", b"DataParallel", b"autograd.grad")):
        importlib.import_module("torch._dynamo")  # which these import when first used: seconds, on each of the ranks
    end = time.monotonic() + LIMIT
    for ranks in exercise.check.RANKS:
        outcomes = run_ranks(file, ranks, exercise.check.check, end - time.monotonic())
        if any(outcome.kind != "passed" for outcome in outcomes):
            return f"On {ranks} processes: {explain_outcomes(exercise, outcomes)}"
    return None


def run_ranks(file: Path, ranks: int, work: Work, limit: float = LIMIT) -> list[Outcome]:
    """Run the work on this many processes, for at most `limit` seconds, and return how each rank ended."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(ranks)]
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=run_rank, args=(file, work, rank, store, pipes), daemon=True) for rank in range(ranks)
        ]
        try:
            for process, (_, theirs) in zip(processes, pipes, strict=True):
                process.start()
                theirs.close()
            outcomes = receive([cast(Any, own) for own, _ in pipes], time.monotonic() + limit)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [outcomes.get(rank) or exited(process) for rank, process in enumerate(processes)]


def receive(pipes: list[Connection], end: float) -> dict[int, Outcome]:
    """Return how the ranks have ended, or where they are; a rank is missing if its process has ended without a result."""
    outcomes, silent, asked = dict[int, Outcome](), set(range(len(pipes))), False
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
            asked, end = True, time.monotonic() + 1
            for rank in silent:
                with suppress(OSError):
                    pipes[rank].send("where")
    return outcomes


def exited(process: BaseProcess) -> Outcome:
    """Return how a process ended that has sent no result."""
    code = process.exitcode or 0
    if code == -signal.SIGABRT:
        cause = (
            "gloo does this when the tensor that arrives is larger than expected: are shape and dtype the same on all ranks?"
        )
        return Outcome("exited", f"the process was aborted; {cause}")
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}, as by os._exit"
    return Outcome("exited", f"the process {how}, without a result.")


def run_rank(file: Path, work: Work, rank: int, store: str, pipes: list[tuple[Connection, Connection]]) -> None:
    """Run the work in this process. It stays until it is killed, so that no peer's wait ends with a lost connection."""
    for each, (ours, theirs) in enumerate(pipes):  # inherited: open ends here would hide that another process has ended
        ours.close()
        if each != rank:
            theirs.close()
    pipe = pipes[rank][1]
    torch.set_num_threads(1)
    calls: list[Call] = []
    main = threading.get_ident()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then kills this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # gloo aborts on tensors of different sizes
    cast(Any, sys.stdout).reconfigure(line_buffering=True)  # what the learner prints is not lost

    def answer() -> None:
        try:
            pipe.recv()
        except EOFError:  # the parent was killed
            os._exit(1)
        pipe.send(place(sys._current_frames()[main], file, calls))  # pyright: ignore[reportPrivateUsage]

    threading.Thread(target=answer, daemon=True).start()
    try:
        limit = timedelta(seconds=10 * LIMIT)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(pipes), timeout=limit)
        of_all_ranks(None)  # connects the ranks
        pipe.send(outcome_of(file, work, calls))
    except OSError:
        os._exit(1)
    threading.Event().wait()


def outcome_of(file: Path, work: Work, calls: list[Call]) -> Outcome:
    """Run the work and return how it ended."""
    try:
        threading.setprofile(recorder(file, calls))  # of threads that the learner starts
        sys.setprofile(recorder(file, calls))
        theirs = ModuleType(file.stem)
        theirs.__dict__.update(runpy.run_path(str(file), run_name=file.stem))
        return Outcome("passed", result=work(theirs, calls))
    except Wrong as wrong:
        return Outcome("wrong", str(wrong))
    except NotImplementedError as error:
        at = last_line(error, file)
        return Outcome("missing", f"line {at} still raises NotImplementedError: write the function there.")
    except BaseException as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if any(lost in text for lost in LOST):
            return Outcome("lost", text)
        line = last_line(error, file)
        if line is None:
            gone = [call.line for call in calls if call.name == "destroy_process_group"]
            why = f"line {gone[0]} destroys the process group, which the check needs" if gone else text
            return Outcome("wrong", f"the check cannot use the functions of the file: {why}")
        return Outcome("raised", f"line {line}, `{linecache.getline(str(file), line).strip()}`, raises {text}")
    finally:
        sys.setprofile(None)


def last_line(error: BaseException, file: Path) -> int | None:
    """Return the innermost line of the learner's file in an exception's traceback."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    return lines[-1] if lines else None


def recorder(file: Path, calls: list[Call]) -> Any:
    """Return a profile function that appends the learner's calls of torch.distributed to `calls`.

    A hook of the interpreter, because nothing is patched: the learner's file calls torch itself.
    """
    name = str(file)

    def record(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and frame.f_code.co_filename == name and getattr(called, "__name__", "") == "wait":
            calls.append(Call("wait", frame.f_lineno))
        if event == "call" and frame.f_code.co_filename.endswith("distributed_c10d.py"):
            caller = frame.f_back
            while caller and caller.f_code.co_filename.endswith("c10d_logger.py"):  # torch's decorators
                caller = caller.f_back
            asks = frame.f_code.co_name.startswith(("get_", "is_", "_"))  # such as get_rank, which communicate nothing
            if caller and caller.f_code.co_filename == name and caller.f_lineno is not None and not asks:
                batch = [operation.op.__name__ for operation in frame.f_locals.get("p2p_op_list", ())]
                for each in batch or [frame.f_code.co_name]:
                    calls.append(Call(each, caller.f_lineno, bool(batch or frame.f_locals.get("async_op"))))

    return record


def place(frame: FrameType | None, file: Path, calls: list[Call]) -> Outcome:
    """Return in which line of the learner's file a rank is, and the call of torch.distributed in which it waits."""
    name = ""
    while frame and frame.f_code.co_filename != str(file):
        if frame.f_code.co_filename.endswith("distributed_c10d.py"):
            name = frame.f_code.co_name
        frame = frame.f_back
    if frame is None:
        return Outcome("waits", f"has returned, after {len(calls)} calls of torch.distributed")
    line = frame.f_lineno
    if calls and calls[-1][:2] == ("wait", line):  # a function in C++, which has no frame
        name = "wait"
    what = f"waits in {name}, its call number {len(calls)} of torch.distributed," if name else "is still busy"
    return Outcome("waits", f"{what} at line {line}: `{linecache.getline(str(file), line).strip()}`", Call(name, line))


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
    waiting: Mapping[int, Call | None] = {rank: outcome.call for rank, outcome in enumerate(outcomes)}
    busy = [rank for rank, call in waiting.items() if call and not call.name]
    explain = getattr(exercise.check, "explain_hang", None)
    why = explain(waiting) if explain and not busy else None
    if busy:
        why = f"rank {busy[0]} has not ended within {limit:g} seconds: does a loop never end, or does it sleep?"
    elif not any(waiting.values()):
        why = "the check did not end, though the functions have returned: run it again when the machine is less busy."
    lines = [
        f"  rank {rank} {outcome.text if outcome.kind != 'passed' else 'is done'}" for rank, outcome in enumerate(outcomes)
    ]
    return "\n".join([why or "the ranks do not make the same calls, so some wait forever.", *lines])
