"""Start ranks from a script or a notebook: torch.multiprocessing forks one function per rank."""

import json
import logging
import os
import pickle
import re
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Process
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from ddp_lab.config.causes import WAIT_FOR_CAUSE, is_secondary
from ddp_lab.config.errors import ConfigError, place_of

Result = TypeVar("Result")
HOST = "127.0.0.1"
EXIT_GRACE = 3.0  # seconds
RETURN = "Let the function return on all ranks, at its end"
KILLED = 5.0  # seconds to wait for a rank that was killed, which a driver may delay


class RankError(RuntimeError):
    """An exception in a rank. The message ends with the rank's traceback."""


def launch(function: Callable[..., Result], *args: Any, nproc: int = 2) -> Result:
    """Call `function(*args)` on `nproc` ranks of this machine at the same time.

    The ranks are forked: the function may be defined in a notebook, and sees all that was defined
    before. On the CPU each rank has one thread, because the threads of this process do not exist
    in a fork. No rank is left when this returns, raises an exception or is interrupted.

    Args:
        function: function that joins the other ranks by `with Lab(...)`.
        args: arguments of the function, the same on every rank.
        nproc: number of ranks, at least 1.

    Returns:
        The result of the function on rank 0, which pickle must support.

    Raises:
        ConfigError: this process is a rank itself, or has used CUDA; or `nproc` is not an integer
            of at least 1.
        RankError: the function raised an exception on a rank, pickle does not support the result,
            a rank was ended, or called sys.exit. The message names the rank, and has its traceback.
    """
    refuse(nproc)
    # torch warns about each rank that it ends
    logging.getLogger(start_processes.__module__).setLevel(logging.ERROR)
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ddp_lab_") as folder:
        file = Path(folder, "result")
        arguments = nproc, port, file, function, args
        ranks: Any = start_processes(run_rank, arguments, nproc, join=False, start_method="fork")
        try:
            # Not before: a rank that is forked while the store's thread holds a lock would wait for
            # it forever.
            _store = TCPStore(
                HOST,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            while not ranks.join():
                require_returned(ranks.processes, Path(folder))
            require_returned(ranks.processes, Path(folder))
            return pickle.loads(file.read_bytes())
        except (ProcessExitedException, ProcessRaisedException) as error:
            raise RankError(describe(error, Path(folder))) from None
        finally:
            end_ranks(ranks.processes)


def end_ranks(processes: Sequence[Process]) -> None:
    """Kill the ranks that still run, as after Ctrl-C, and wait for them.

    Their worker processes end by themselves.
    """
    for process in processes:
        process.kill()
    for process in processes:
        process.join(KILLED)


def refuse(nproc: Any) -> None:
    """Raise a ConfigError if ranks cannot be forked here. The argument is that of `launch`."""
    if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
        raise ConfigError(f"launch: nproc={nproc}: must be an integer of at least 1")
    if "TORCHELASTIC_RUN_ID" in os.environ or "RANK" in os.environ:
        raise ConfigError(
            "launch: this process is a rank already, started by torchrun or by launch. Call the "
            "function itself, or start the script by python"
        )
    if torch.cuda.is_initialized():
        raise ConfigError(
            "launch: this process has used CUDA, which a fork cannot use again. Call launch before "
            "anything is on a GPU (in a notebook: restart the kernel), or put the function into a "
            "script and start it by torchrun"
        )


def run_rank(
    rank: int,
    nproc: int,
    port: int,
    file: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Call the function on this rank, as torchrun would start it.

    Rank 0 writes its result to a file, as pickle does.

    Raises:
        ConfigError: pickle does not support the result.
        Exception: the function raised it.
    """
    places = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "MASTER_PORT": port,
    }
    os.environ |= {
        "MASTER_ADDR": HOST,
        "TORCHELASTIC_RUN_ID": "launch",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.environ |= {name: str(value) for name, value in places.items()}
    torch.set_num_threads(1)
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(file.with_name(f"error{rank}"))

    try:
        result = function(*args)
    except SystemExit as error:
        if error.code:
            raise
        time.sleep(EXIT_GRACE)  # in which a rank that needs this one can report where both are
        called = f"sys.exit({'' if error.code is None else error.code}){place_of(error)}"
        raise ConfigError(f"launch: the function called {called}. {RETURN}") from None
    except Exception as error:
        # the error that has caused it is found meanwhile, and ends this rank
        if is_secondary(error):
            time.sleep(WAIT_FOR_CAUSE)
        raise

    try:
        file.with_name(f"returned{rank}").touch()
        if rank == 0:
            file.write_bytes(pickle.dumps(result))
    except Exception as error:  # pickle raises several kinds
        raise ConfigError(
            f"launch: a {type(result).__name__} cannot be returned to the process that started the "
            f"ranks ({error}). Return tensors, numbers, texts, or lists and dicts of them"
        ) from None


def require_returned(processes: Sequence[Process], folder: Path) -> None:
    """Check that the ranks which have ended with code 0 have returned from the function.

    Args:
        processes: of the ranks, in order.
        folder: where each rank leaves a file when it returns.

    Raises:
        RankError: a rank has not.
    """
    for rank, process in enumerate(processes):
        if process.exitcode == 0 and not (folder / f"returned{rank}").exists():
            raise RankError(
                f"rank {rank} ended with exit code 0 in the function, for example by os._exit(0). "
                f"{RETURN}"
            )


def describe(error: ProcessExitedException | ProcessRaisedException, folder: Path) -> str:
    """Return what ended a rank: a signal, an exit code, or an exception.

    An exception has its traceback, a user's mistake has none.

    Args:
        error: of the first rank that has failed.
        folder: where a thread of a rank leaves why it has ended its process.
    """
    if isinstance(error, ProcessExitedException):
        with suppress(OSError):
            record = json.loads((folder / f"error{error.error_index}").read_text())
            message = record["message"]["message"].removeprefix("error: ")
            return f"rank {error.error_index} raised:\n\n{ConfigError.__name__}: {message}"
        if error.signal_name:
            how = f"was ended by {error.signal_name}"
        else:
            how = f"ended with exit code {error.exit_code}"
        return f"rank {error.error_index} {how}"
    raised = str(error).partition("error:\n")[2].rstrip()
    mistake = re.search(rf"^{ConfigError.__module__}\.(\w+: .*)", raised, re.MULTILINE | re.DOTALL)
    return f"rank {error.error_index} raised:\n\n{mistake[1] if mistake else raised}"
