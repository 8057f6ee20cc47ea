"""Start ranks from a script or a notebook: a function, forked once for each rank, under torch's elastic agent."""

import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ddp_lab.config.errors import ConfigError, TrainingError
from ddp_lab.world.process import show

Result = TypeVar("Result")


class RankError(RuntimeError):
    """An exception in a rank. The message ends with the rank's traceback."""


def launch(function: Callable[..., Result], *args: Any, nproc: int = 2) -> Result:
    """Call `function(*args)` on `nproc` ranks of this machine at the same time, and return the result of rank 0.

    The ranks are forked: the function may be defined in a notebook, and sees all that was defined before. On the CPU each has
    one thread, because the threads of this process do not exist in a fork.

    Args:
        function: joins the other ranks by `with Lab(...)`. The result of rank 0 must be one that pickle supports.
        args: its arguments.
        nproc: number of ranks.

    Raises:
        ConfigError: this process is a rank itself, or has used CUDA, or the number is not an integer of at least 1.
        RankError: the function raised an exception on a rank, or a rank was ended.
    """
    refuse(nproc)
    with tempfile.TemporaryDirectory(prefix="ddp_lab_") as folder, signals_and_logs():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=f"launch-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="fork",
            local_addr="localhost",  # the name of this machine may not resolve
            logs_specs=DefaultLogsSpecs(folder),
        )
        try:
            return pickle.loads(elastic_launch(config, run_rank)(function, args)[0])
        except ChildFailedError as error:
            first = min(error.failures.items(), key=lambda item: item[1].timestamp)
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise
    raise RankError(describe(*first))


def refuse(nproc: Any) -> None:
    """Raise a ConfigError if ranks cannot be forked here. The argument is that of `launch`."""
    if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
        raise ConfigError(f"launch: nproc={nproc}: must be an integer of at least 1")
    if "TORCHELASTIC_RUN_ID" in os.environ or "RANK" in os.environ:
        raise ConfigError(
            "launch: this process is a rank already, started by torchrun or by launch. Call the function itself, or start the "
            "script by python"
        )
    if torch.cuda.is_initialized():
        raise ConfigError(
            "launch: this process has used CUDA, which a fork cannot use again. Call launch before anything is on a GPU (in a "
            "notebook: restart the kernel), or put the function into a script and start it by torchrun"
        )


@contextmanager
def signals_and_logs() -> Generator[None]:
    """Silence the logs of torch's agent, whose content `launch` raises, and restore the signal handlers that it replaces."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT) if in_main_thread else ()
    before = {number: signal.getsignal(number) for number in numbers}
    disabled = logging.root.manager.disable
    if "LOGLEVEL" not in os.environ:  # torch's variable
        logging.disable()
    try:
        yield
    finally:
        logging.disable(disabled)
        for number, handler in before.items():
            signal.signal(number, handler)


def run_rank(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Call the function on this rank, and return its result in bytes: those of tensors would else be in shared memory.

    An exception is written to the rank's error file, and ends it with exit code 1.
    """
    logging.disable(logging.NOTSET)
    torch.set_num_threads(1)
    try:
        result = function(*args)
        return as_bytes(result) if os.environ["RANK"] == "0" else b""
    except (ConfigError, TrainingError) as error:
        show(f"{type(error).__name__}: {error}")
    except Exception as error:
        if "onnection" in str(error):  # of a rank that has ended: let its error be found first, which ends this rank
            time.sleep(2)
        show(traceback.format_exc())
    sys.stdout.flush()
    sys.exit(1)


def as_bytes(result: Any) -> bytes:
    """Return a result as pickle writes it.

    Raises:
        ConfigError: pickle does not support it.
    """
    try:
        return pickle.dumps(result)
    except Exception as error:  # pickle raises several kinds
        raise ConfigError(
            f"launch: a {type(result).__name__} cannot be returned to the process that started the ranks ({error}). Return "
            "tensors, numbers, texts, or lists and dicts of them"
        ) from None


def describe(rank: int, failure: Any) -> str:
    """Return what ended a rank.

    Args:
        rank: its number.
        failure: torch's ProcessFailure.
    """
    found = failure.error_file_data["message"]
    if not isinstance(found, str):
        return f"rank {rank} raised:\n\n{found['extraInfo']['py_callstack'].rstrip()}"
    code = failure.exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} {how}"
