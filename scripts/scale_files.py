"""Counting the file operations below a directory, in the processes that scale_sim.py and the tests simulate ranks in.

Python reports opening, listing, making, renaming, linking and removing files to its audit hooks. It does not report `stat`, so
`os.stat` is replaced. Both last as long as the process.
"""

import os
import sys
import threading
from collections import Counter
from typing import Any

EVENTS = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rmdir", "os.link", "os.rename", "os.remove", "os.truncate"}


class FileCounter:
    """The number of operations on paths that begin with `folder`, by kind, from now on."""

    def __init__(self, folder: str):
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        stat = os.stat

        def counted(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
            self._count("os.stat", path)
            return stat(path, *args, **kwargs)

        os.stat = counted
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS and args:
            self._count(event, args[0])

    def _count(self, event: str, path: Any) -> None:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder):
            with self._lock:
                self.counts[event] += 1
