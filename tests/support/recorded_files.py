"""A recorder of what a process does to the files of a folder.

It has the folder as a kill or a power failure would leave it.

Python's audit hooks announce each operation before it happens. What a file contains counts as lost
until `os.fsync`.
"""

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

RENAME = "os.rename"  # of os.rename and os.replace
CHANGES = {
    RENAME: "rename",
    "os.remove": "remove",
    "os.rmdir": "rmdir",
    "os.symlink": "link",
    "os.mkdir": "mkdir",
}
WRITABLE = os.O_WRONLY | os.O_RDWR


@dataclass
class RecordedFiles:
    """What was done to a folder.

    Attributes:
        folder: the folder.
        copies: where the folder is copied to before each operation.
        operations: names of the operations with the names of their files, in order.
        states: the copies, in which files that were not synced are empty.
    """

    folder: Path
    copies: Path
    operations: list[tuple[str, str]] = field(default_factory=list)
    states: list[Path] = field(default_factory=list)
    unsynced: set[str] = field(default_factory=set)
    lock: Any = field(default_factory=threading.RLock)
    is_copying: bool = False

    def note(self, event: str, args: tuple) -> None:
        """Record an operation that is announced, if it changes a file of the folder."""
        with self.lock:
            if self.is_copying:
                return
            if event == "open" and isinstance(args[0], str | Path) and (args[2] or 0) & WRITABLE:
                self.add("open", str(args[0]))
                self.unsynced.add(str(args[0]))
            elif event in CHANGES:
                source = os.fspath(args[0])
                target = os.fspath(args[1]) if event in (RENAME, "os.symlink") else source
                self.add(CHANGES[event], str(target))
                if event == RENAME:
                    moved = {path for path in self.unsynced if f"{path}/".startswith(f"{source}/")}
                    self.unsynced -= moved
                    self.unsynced |= {f"{target}{path.removeprefix(str(source))}" for path in moved}

    def synced(self, descriptor: int) -> None:
        """Record that a file or a folder is synced."""
        with self.lock:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self.add("sync", path)
            self.unsynced.discard(path)

    def add(self, operation: str, path: str) -> None:
        # rmtree names files in a directory
        inside = path if path.startswith("/") else f"{self.folder}/{path}"
        if not f"{inside}/".startswith(f"{self.folder}/"):
            return
        self.operations.append((operation, Path(inside).name))
        self.copy()

    def copy(self) -> None:
        """Copy the folder as a power failure would leave it now."""
        self.is_copying = True
        state = self.copies / f"{len(self.states):03d}"
        shutil.copytree(self.folder, state, symlinks=True)
        for path in self.unsynced:
            copied = state / Path(path).relative_to(self.folder)
            if Path(path).is_relative_to(self.folder) and copied.is_file():
                copied.write_bytes(b"")
        self.states.append(state)
        self.is_copying = False


active: list[RecordedFiles] = []


def audit(event: str, args: tuple) -> None:
    for recorder in active:
        recorder.note(event, args)


sys.addaudithook(audit)  # hooks cannot be removed; this one does nothing while `active` is empty


@contextmanager
def recorded(folder: Path, copies: Path) -> Iterator[RecordedFiles]:
    """Record what is done to a folder during the body, by all threads.

    The last state is that at its end.
    """
    recorder = RecordedFiles(folder, copies)
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        recorder.synced(descriptor)
        sync(descriptor)

    with mock.patch("os.fsync", fsync):
        active.append(recorder)
        try:
            yield recorder
        finally:
            active.remove(recorder)
    recorder.copy()
