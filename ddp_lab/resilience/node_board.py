"""The board of a node: a small file in its memory, by which the ranks of the node know of each other.

One page holds the first failure of the launch, one the overview of all nodes, and one the heartbeat of each rank of the node.
The file is on no disk that nodes share. Its directory has a random name, and only this user can read it.
"""

import fcntl
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_lab.config.errors import ConfigError
from ddp_lab.world.runtime import Runtime

PAGE = 4096  # bytes
FAILURE, OVERVIEW, RANKS = 0, 1, 2  # numbers of pages; RANKS + N is that of local rank N
FILE = "heartbeats"
PREFIX = "ddp_lab-"

Heartbeat = dict[str, Any]  # of a rank: rank, host, pid, node, beat, epoch, step, doing, since, waits


def memory_folder() -> Path:
    """Return the directory of files in memory, or else that of temporary files."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


class NodeBoard:
    """The board of this node. Collective: the first rank of each node creates the file.

    Args:
        folder: where it is created.

    Attributes:
        path: the file.

    Raises:
        ConfigError: the file cannot be created.
    """

    def __init__(self, runtime: Runtime, folder: Path):
        self.size = runtime.local_world_size
        self._file: int | None = None  # set by `_create` on the node's first rank
        self.path = Path(str(runtime.agree("heartbeats", lambda: str(self._create(folder)), per_node=True)))
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR)
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def _create(self, folder: Path) -> Path:
        remove_abandoned(folder)
        try:
            made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))  # with mode 0700 and a random name
            self._file = os.open(made / ".new", os.O_RDWR | os.O_CREAT, 0o600)
            os.write(self._file, bytes(PAGE * (RANKS + self.size)))  # now, so that no write fails later for lack of memory
            fcntl.flock(self._file, fcntl.LOCK_SH)  # before the file has its name, so that nobody finds it without a lock
            os.rename(made / ".new", made / FILE)
        except OSError as error:
            raise ConfigError(
                f"{folder}: cannot create the file of the heartbeats there ({error.strerror}); free space in it"
            ) from None
        return made / FILE

    def write(self, page: int, record: dict[str, Any]) -> None:
        """Write a page."""
        assert self._file is not None
        os.pwrite(self._file, json.dumps(record).encode()[: PAGE - 1] + b"\n", page * PAGE)

    def read(self, page: int) -> dict[str, Any] | None:
        """Return the content of a page; None if nothing was written (or it is just being written)."""
        assert self._file is not None
        return parse(os.pread(self._file, PAGE, page * PAGE))

    def heartbeats(self) -> list[Heartbeat]:
        """Return the heartbeats of the node's ranks that have written one, in order of local rank."""
        return [beat for beat in (self.read(RANKS + local) for local in range(self.size)) if beat]

    def remove(self) -> None:
        """Remove the file when all ranks of the node have opened it, which they show by a heartbeat. They still can use it.

        Otherwise it is left to `remove_abandoned` of a later launch.
        """
        if len(self.heartbeats()) == self.size:
            shutil.rmtree(self.path.parent, ignore_errors=True)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def parse(page: bytes) -> dict[str, Any] | None:
    """Return the record at the beginning of a page; None if there is none."""
    try:
        return json.loads(page.partition(b"\n")[0])
    except ValueError:
        return None


def remove_abandoned(folder: Path) -> None:
    """Remove the directories of boards that no process uses any more, because a launch of this user was killed."""
    for made in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):  # the file is missing or locked
            if made.lstat().st_uid == os.getuid():
                with (made / FILE).open("rb+") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(made)
