"""The key-value store of the ranks, with a count of what goes through it."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

# Documented as torch.distributed.Store etc., but the module does not export them explicitly.
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

DECISION_TIMEOUT = timedelta(minutes=30)  # the longest wait is for a slow dataset download on another rank


@dataclass
class Traffic:
    """What a rank has sent to the store and received, without what torch itself sends (the process group).

    Attributes:
        operations: requests to the server, by the prefix of the connection's keys.
        size: bytes of keys and values.
    """

    operations: Counter[str] = field(default_factory=Counter)
    size: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, prefix: str, *parts: str | bytes) -> None:
        """Count an operation with these keys and values."""
        with self.lock:
            self.operations[prefix] += 1
            self.size += sum(len(part) for part in parts)


class CountedStore:
    """One connection to the store. All ranks see the same keys.

    Args:
        base: the store of torch.
        traffic: where to count.
        prefix: of the keys.
    """

    def __init__(self, base: Store, traffic: Traffic | None = None, prefix: str = ""):
        self.base, self.traffic, self.prefix = base, traffic or Traffic(), prefix

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self.traffic.add(self.prefix, key, value)
        self.base.set(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """Set several values in one operation."""
        self.traffic.add(self.prefix, *keys, *values)
        self.base.multi_set(list(keys), list(values))  # pyright: ignore[reportAttributeAccessIssue]  # missing in its stubs

    def wait(self, keys: Sequence[str], timeout: timedelta = DECISION_TIMEOUT) -> None:
        """Wait until all keys are set. Raises a DistError of torch after the timeout."""
        self.traffic.add(self.prefix, *keys)
        self.base.wait(list(keys), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set, without waiting."""
        self.traffic.add(self.prefix, *keys)
        return self.base.check(list(keys))

    def get(self, key: str) -> str:
        """Return a value. Waits until it is set."""
        value = self.base.get(key)
        self.traffic.add(self.prefix, key, value)
        return value.decode()

    def multi_get(self, keys: Sequence[str]) -> list[str]:
        """Return several values in one operation. Waits until they are set."""
        values = self.base.multi_get(list(keys))
        self.traffic.add(self.prefix, *keys, *values)
        return [value.decode() for value in values]

    def connect(self, prefix: str) -> "CountedStore":
        """Return another connection to the keys that begin with a prefix, for another thread.

        Threads cannot share a connection: a thread that waits for a key would block the others.
        """
        return CountedStore(PrefixStore(prefix, self.base.clone()), self.traffic, prefix)
