"""Functions that child processes call in the tests, without anything that takes long to import."""

import os
import time


def prepares(kept: dict) -> None:
    kept["calls"] = 0


def leaves(kept: dict) -> None:
    """End the process."""
    os._exit(7)


def sleeps(kept: dict, seconds: float) -> int:
    """Sleep, and return how often this process has done so."""
    time.sleep(seconds)
    kept["calls"] += 1
    return kept["calls"]
