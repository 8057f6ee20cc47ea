"""What a rank does with a learner's file.

It runs the file, records its calls, and sends how it ended, or where it is when asked.
"""

import linecache
import os
import resource
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from ddp_lab.config.errors import count
from ddp_lab.exercises.explain import Call, Wrong, of_all_ranks

GROUP_TIMEOUT = timedelta(minutes=1)  # the parent ends its ranks long before
# gloo's errors on a rank whose peer has ended
LOST = ("Connection closed", "Connection reset", "Broken pipe")


class Outcome(NamedTuple):
    """How a rank ended.

    Attributes:
        kind: passed; or, the most telling first: missing (not written yet), raised, wrong, lost
            (another rank ended), exited, waits.
        text: the explanation.
        call: for `waits`, the call in which the rank waits, or the isend or irecv for which it
            does; without a name if it is busy.
        result: for `passed`, what the work returned.
    """

    kind: str
    text: str = ""
    call: Call | None = None
    result: Any = None


# with the learner's module and its calls, on a rank of an open group
Work = Callable[[ModuleType, list[Call]], Any]


def run_rank(
    file: Path, work: Work, rank: int, store: str, pipes: list[tuple[Connection, Connection]]
) -> None:
    """Run the work in this process.

    It stays until it is killed, so that no peer's wait ends with a lost connection.
    """
    # inherited: open ends here would hide that another process has ended
    for each, (ours, theirs) in enumerate(pipes):
        ours.close()
        if each != rank:
            theirs.close()
    pipe = pipes[rank][1]
    torch.set_num_threads(1)
    calls: list[Call] = []
    main = threading.get_ident()
    # Ctrl-C is the parent's, which then kills this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=len(pipes),
            timeout=GROUP_TIMEOUT,
        )
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
        return Outcome(
            "missing", f"line {at} still raises NotImplementedError: write the function there."
        )
    except BaseException as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if any(lost in text for lost in LOST):
            return Outcome("lost", text)
        line = last_line(error, file)
        if line is None:
            gone = [call.line for call in calls if call.name == "destroy_process_group"]
            if gone:
                why = f"line {gone[0]} destroys the process group, which the check needs"
            else:
                why = text
            return Outcome("wrong", f"the check cannot use the functions of the file: {why}")
        return Outcome(
            "raised", f"line {line}, `{linecache.getline(str(file), line).strip()}`, raises {text}"
        )
    finally:
        sys.setprofile(None)


def last_line(error: BaseException, file: Path) -> int | None:
    """Return the innermost line of the learner's file in an exception's traceback."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) == file
    ]
    return lines[-1] if lines else None


def recorder(file: Path, calls: list[Call]) -> Any:
    """Return a profile function that appends the learner's calls of torch.distributed to `calls`.

    A hook of the interpreter, because nothing is patched: the learner's file calls torch itself.
    """
    name = str(file)

    def record(frame: FrameType, event: str, called: Any) -> None:
        if (
            event == "c_call"
            and frame.f_code.co_filename == name
            and getattr(called, "__name__", "") == "wait"
        ):
            calls.append(Call("wait", frame.f_lineno))

        if event == "call" and frame.f_code.co_filename.endswith("distributed_c10d.py"):
            caller = frame.f_back
            # torch's decorators
            while caller and caller.f_code.co_filename.endswith("c10d_logger.py"):
                caller = caller.f_back
            # such as get_rank, which communicate nothing
            asks = frame.f_code.co_name.startswith(("get_", "is_", "_"))
            if (
                caller
                and caller.f_code.co_filename == name
                and caller.f_lineno is not None
                and not asks
            ):
                batch = [
                    operation.op.__name__ for operation in frame.f_locals.get("p2p_op_list", ())
                ]
                for each in batch or [frame.f_code.co_name]:
                    calls.append(
                        Call(each, caller.f_lineno, bool(batch or frame.f_locals.get("async_op")))
                    )

    return record


def place(frame: FrameType | None, file: Path, calls: list[Call]) -> Outcome:
    """Return a rank's line in the learner's file, and the torch.distributed call where it waits."""
    name = ""
    while frame and frame.f_code.co_filename != str(file):
        if frame.f_code.co_filename.endswith("distributed_c10d.py"):
            name = frame.f_code.co_name
        frame = frame.f_back
    if frame is None:
        return Outcome(
            "waits", f"has returned, after {count(len(calls), 'call')} of torch.distributed"
        )

    line = frame.f_lineno
    if calls and calls[-1][:2] == ("wait", line):  # a function in C++, which has no frame
        name = "wait"
    if name:
        state = f"waits in {name}, its call number {len(calls)} of torch.distributed,"
    else:
        state = "is still busy"

    awaited = started_alone(calls) if name == "wait" else name
    return Outcome(
        "waits",
        f"{state} at line {line}: `{linecache.getline(str(file), line).strip()}`",
        Call(awaited, line),
    )


def started_alone(calls: list[Call]) -> str:
    """Return the isend or irecv for which the last call waits; "wait" if there may be others."""
    *before, started = [Call("", 0), *calls[:-1]][-2:]
    if started.name in ("isend", "irecv") and before and before[0].line != started.line:
        return started.name
    return "wait"
