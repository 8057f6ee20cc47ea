"""Doing something at regular intervals, and counting for how long something does not change."""

import threading
import time
from typing import Any


class Pace:
    """Waits for the next of a series of turns, one every `period` seconds, however long a turn takes.

    Turns that were missed, because a turn took longer or the process was suspended, are not made up for.
    """

    def __init__(self, period: float):
        self.period, self._next = period, time.monotonic()

    def wait(self, stop: threading.Event) -> bool:
        """Wait for the next turn, or until `stop` is set. Return whether it is set."""
        now = time.monotonic()
        self._next = max(self._next + self.period, now)
        return stop.wait(self._next - now)


class Unchanged:
    """Counts how many looks in succession have found the same value.

    Time is counted in looks and not read from a clock: while the process that looks is suspended, nothing is counted.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[Any, int]] = {}

    def count(self, key: Any, value: Any) -> int:
        """Look at the value of `key`, and return how many looks before have found the same one."""
        before, looks = self._seen.get(key, (None, 0))
        looks = looks + 1 if key in self._seen and before == value else 0
        self._seen[key] = value, looks
        return looks

    def forget(self, key: Any) -> None:
        """Count anew from the next look at the value of `key` on."""
        self._seen.pop(key, None)
