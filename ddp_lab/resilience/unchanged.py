"""Counting for how long something does not change."""

from typing import Any


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
