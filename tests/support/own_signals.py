"""A model of the user's that sends a signal to its command when constructed."""

import os
import signal
import time

from ddp_lab.models.simple_cnn import simple_cnn

PATIENCE = 20.0  # seconds that a rank waits for its end, which the signal to its launcher causes


def signalling_cnn(number: int, **options):
    """Send a signal to the process that the user has started: a rank's parent, else this one."""
    is_rank = "RANK" in os.environ
    if os.environ.get("RANK", "0") == "0":
        os.kill(os.getppid() if is_rank else os.getpid(), signal.Signals(number))
    if is_rank:
        time.sleep(PATIENCE)
    return simple_cnn(**options)
