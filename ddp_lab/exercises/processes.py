"""Run a learner's file on a few processes with gloo, and say in words how it went; nothing hangs, and no traceback is shown."""

import ast
import linecache
import multiprocessing
import os
import runpy
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from ddp_lab.exercises.catalog import Exercise
from ddp_lab.exercises.explain import Call, Wrong

LIMIT = 6.0  # seconds for one number of processes; a solution takes a fraction of a second
GRACE = 0.5  # seconds for the other ranks' outcomes after the first failure
LOST = ("Connection closed", "Connection reset", "Broken pipe")  # gloo's errors on a rank whose peer has ended


class Outcome(NamedTuple):
    """How a rank ended.

    Attributes:
        kind: passed; or, the most telling first: missing (not written yet), raised, wrong, lost (another rank ended), exited,
            waits.
        text: the explanation.
        call: for `waits`, the call in which the rank waits.
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
    found = not_allowed(exercise, file)
    for ranks in () if found else exercise.check.RANKS:
        outcomes = run_ranks(file, ranks, exercise.check.check)
        if any(outcome.kind != "passed" for outcome in outcomes):
            return f"On {ranks} processes: {explain_outcomes(exercise, file, outcomes)}"
    return found


def not_allowed(exercise: Exercise, file: Path) -> str | None:
    """Return the message about a syntax error, or about a function that would do the exercise."""
    try:
        tree = ast.parse(file.read_text())
    except SyntaxError as error:
        return f"line {error.lineno} is not Python: {error.msg}."
    except (OSError, ValueError) as error:
        return f"{file} cannot be read: {error}."
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in exercise.check.NOT_ALLOWED:
            line = cast(Any, node).lineno
            return f"line {line} uses {name}, which does the exercise for you; {exercise.check.NOT_ALLOWED[name]}."
    return None


def run_ranks(file: Path, ranks: int, work: Work, limit: float = LIMIT) -> list[Outcome]:
    """Run the work on this many processes, for at most `limit` seconds, and return how each rank ended."""
    context = multiprocessing.get_context("fork")
    outcomes: dict[int, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(ranks)]
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=run_rank, args=(file, work, rank, ranks, store, pipes[rank][1]), daemon=True)
            for rank in range(ranks)
        ]
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        ours: list[Any] = [own for own, _ in pipes]
        end = time.monotonic() + limit
        while len(outcomes) < ranks and (left := end - time.monotonic()) > 0:
            for ready in wait([pipe for rank, pipe in enumerate(ours) if rank not in outcomes], left):
                rank = ours.index(ready)
                outcomes[rank] = receive(ours[rank])
                if outcomes[rank].kind != "passed":
                    end = min(end, time.monotonic() + GRACE)
        for rank in set(range(ranks)) - set(outcomes):
            outcomes[rank] = ask_where(ours[rank])
        for process in processes:
            process.kill()
            process.join()
    return [outcomes[rank] for rank in range(ranks)]


def receive(pipe: Connection) -> Outcome:
    """Return what a rank has sent, or that it has exited."""
    try:
        return cast(Outcome, pipe.recv())
    except EOFError:
        return Outcome("exited", "the process ended without a result: sys.exit, os._exit or a crash")


def ask_where(pipe: Connection) -> Outcome:
    """Return where a rank that has not ended is."""
    try:
        pipe.send("where")
        if pipe.poll(1):
            return receive(pipe)
    except OSError:
        pass
    return Outcome("waits", "does not respond")


def run_rank(file: Path, work: Work, rank: int, ranks: int, store: str, pipe: Connection) -> None:
    """Run the work in this process. It stays until it is killed, so that no peer's wait ends with a lost connection."""
    torch.set_num_threads(1)
    calls: list[Call] = []
    main = threading.get_ident()

    def answer() -> None:
        pipe.recv()
        pipe.send(place(sys._current_frames()[main], file, calls))  # pyright: ignore[reportPrivateUsage]

    threading.Thread(target=answer, daemon=True).start()
    try:
        limit = timedelta(seconds=10 * LIMIT)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
        pipe.send(outcome_of(file, work, calls))
    except OSError:
        os._exit(1)
    threading.Event().wait()


def outcome_of(file: Path, work: Work, calls: list[Call]) -> Outcome:
    """Run the work and return how it ended."""
    try:
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
            return Outcome("wrong", f"what the functions returned cannot be used by the check: {text}")
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
            asks = frame.f_code.co_name.startswith(("get_", "is_"))  # such as get_rank, which communicate nothing
            if caller and caller.f_code.co_filename == name and caller.f_lineno is not None and not asks:
                calls.append(Call(frame.f_code.co_name, caller.f_lineno, bool(frame.f_locals.get("async_op"))))

    return record


def place(frame: FrameType | None, file: Path, calls: list[Call]) -> Outcome:
    """Return in which line of the learner's file a rank is, and its last call of torch.distributed."""
    while frame and frame.f_code.co_filename != str(file):
        frame = frame.f_back
    if frame is None:
        return Outcome("waits", "has returned, and waits for the others")
    line = frame.f_lineno
    last = calls[-1] if calls else None
    what = f"waits in {last.name}, its call number {len(calls)} of torch.distributed," if last else "is"
    return Outcome(
        "waits", f"{what} at line {line}: `{linecache.getline(str(file), line).strip()}`", Call(last.name if last else "", line)
    )


def explain_outcomes(exercise: Exercise, file: Path, outcomes: list[Outcome], limit: float = LIMIT) -> str:
    """Return the most telling failure of the ranks, in words."""
    kind = min((outcome.kind for outcome in outcomes if outcome.kind != "passed"), key=ORDER.index)
    if kind == "waits":
        return explain_waiting(exercise, outcomes, limit)
    rank = next(rank for rank, outcome in enumerate(outcomes) if outcome.kind == kind)
    text = outcomes[rank].text
    return text if kind in ("missing", "wrong") else f"rank {rank}: {text}"


def explain_waiting(exercise: Exercise, outcomes: list[Outcome], limit: float) -> str:
    """Return which rank waits where after `limit` seconds, and why if the exercise knows."""
    waiting: Mapping[int, Call | None] = {rank: outcome.call for rank, outcome in enumerate(outcomes)}
    explain = getattr(exercise.check, "explain_hang", None)
    why = explain(waiting) if explain else None
    lines = [
        f"  rank {rank} {outcome.text if outcome.kind != 'passed' else 'is done'}" for rank, outcome in enumerate(outcomes)
    ]
    default = "the ranks do not make the same calls, so some wait forever."
    if not any(waiting.values()):
        default = "the check did not end, though the functions have returned: run it again when the machine is less busy."
    return "\n".join([why or default, f"After {limit:g} seconds:", *lines])
