"""Which rank of a script reports an error: the one that has the cause. The others wait until its exit ends them."""

import time

from ddp_lab.config.causes import WAIT_FOR_CAUSE, is_secondary
from ddp_lab.config.errors import ConfigError, SampleError, TrainingError
from ddp_lab.world.runtime import Runtime


def wait_for_reporter(error: BaseException | None, runtime: Runtime) -> None:
    """Wait on a rank of torchrun, or of `launch`, for another rank that reports this error, or its cause.

    Args:
        error: raised in the body of a Lab; None: there is none.
        runtime: this rank.
    """
    if error is None or not runtime.under_torchrun:
        return
    if isinstance(error, SampleError):  # of this rank, or of several that have read the same sample
        another_reports = not is_first(runtime)
    elif isinstance(error, (ConfigError, TrainingError)):  # all ranks raise it, and rank 0 reports
        another_reports = runtime.rank > 0
    else:
        another_reports = is_secondary(error)
    if another_reports:
        time.sleep(WAIT_FOR_CAUSE)


def is_first(runtime: Runtime) -> bool:
    """Return whether this rank is the first one that reports a sample."""
    try:
        return runtime.world_size == 1 or runtime.store.add("sample_error", 1) == 1
    except RuntimeError:  # the rank that keeps the store has exited
        return True
