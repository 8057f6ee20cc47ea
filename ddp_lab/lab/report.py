"""Which rank of a script reports an error: the one that has the cause. The others wait until its exit ends them."""

import time

from ddp_lab.config.errors import ConfigError, SampleError, TrainingError
from ddp_lab.resilience.watchdog import SECONDARY
from ddp_lab.world.runtime import Runtime

REPORTING = 10.0  # seconds in which rank 0 reports an error that all ranks raise, and by its exit ends the others
EXITING = 3.0  # seconds in which a rank exits after an error that other ranks see as a closed connection


def wait_for_reporter(error: BaseException | None, runtime: Runtime) -> None:
    """Wait on a rank of torchrun, or of `launch`, for another rank that reports this error, or its cause.

    Args:
        error: raised in the body of a Lab; None: there is none.
        runtime: this rank.
    """
    if error is None or not runtime.under_torchrun:
        return
    if isinstance(error, SampleError):  # of this rank, or of several that have read the same sample
        time.sleep(0 if is_first(runtime) else REPORTING)
    elif isinstance(error, (ConfigError, TrainingError)):
        time.sleep(REPORTING if runtime.rank else 0)
    elif any(text in str(error) for text in SECONDARY):
        time.sleep(EXITING)


def is_first(runtime: Runtime) -> bool:
    """Return whether this rank is the first one that reports a sample."""
    try:
        return runtime.world_size == 1 or runtime.store.add("sample_error", 1) == 1
    except RuntimeError:  # the rank that keeps the store has exited
        return True
