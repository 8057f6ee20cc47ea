"""Which rank of a script reports an error: the one that has the cause.

The others wait until its exit ends them.
"""

import time

from ddp_lab.config.causes import WAIT_FOR_CAUSE, is_secondary
from ddp_lab.config.errors import ConfigError, SampleError, TrainingError, place_of
from ddp_lab.lab.calls import Calls
from ddp_lab.world.runtime import Runtime


def leave(calls: Calls, error: BaseException | None) -> None:
    """Let the other ranks know why this one leaves, or explain an error that their leaving caused.

    Args:
        calls: of this rank.
        error: raised in the body of the Lab; None: there is none.

    Raises:
        ConfigError: in place of an error of the connections between the ranks, whose cause is
            known.
    """
    if error is None:
        calls.leave("left the `with` block of its Lab")
    elif isinstance(error, SystemExit) and not error.code:
        calls.leave(f"called sys.exit({'' if error.code is None else error.code}){place_of(error)}")
    elif isinstance(error, Exception) and is_secondary(error):
        calls.report()


def wait_for_reporter(error: BaseException | None, runtime: Runtime) -> None:
    """Wait, under torchrun or `launch`, for another rank that reports this error, or its cause.

    Args:
        error: raised in the body of a Lab; None: there is none. After those of the network `leave`
            has waited.
        runtime: this rank.
    """
    if error is None or not runtime.under_torchrun:
        return
    if isinstance(error, SampleError):  # of this rank, or of several that have read the same sample
        another_reports = not is_first(runtime)
    else:  # all ranks raise the errors without a traceback, and rank 0 reports
        another_reports = isinstance(error, (ConfigError, TrainingError)) and runtime.rank > 0
    if another_reports:
        time.sleep(WAIT_FOR_CAUSE)


def is_first(runtime: Runtime) -> bool:
    """Return whether this rank is the first one that reports a sample."""
    try:
        return runtime.world_size == 1 or runtime.store.add("sample_error", 1) == 1
    except RuntimeError:  # the rank that keeps the store has exited
        return True
