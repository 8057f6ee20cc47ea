"""The runs in runs_dir as their files describe them, and the removal of those that have nothing.

It does not import torch.
"""

import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_lab.config.errors import ConfigError
from ddp_lab.observe.metrics_file import objective, read_epochs, read_evaluations
from ddp_lab.resilience.run_directory import LAUNCH_FILE, LOCK_FILE, read_json

# seconds that a launch on another machine counts as possibly running: some file systems do not
# share locks
DAY = 86_400


def last_change(folder: Path) -> float:
    """Return when a directory or a file in it last changed, in seconds as time.time() counts them.

    A launch that is running may rename a temporary file meanwhile.
    """
    times = [folder.lstat().st_mtime]
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            times.append(file.lstat().st_mtime)
    return max(times)


class Run:
    """What the directory of a run contains.

    Args:
        root: the config's `runs_dir`.
        path: the run directory, in `root` or in the directory of a sweep there.

    Attributes:
        state: running, preempted, interrupted, finished or failed; killed: it recorded none of
            these, and no launch writes in it; not started: it ended before its first step.
        rows: the rows of its epochs.
        epochs: number of epochs that its config asks for; None if it has recorded no config.
        changed: when a file in it last changed, in seconds as time.time() counts them.
        over: whether certainly no launch is writing in it.
    """

    def __init__(self, root: Path, path: Path):
        self.path = path
        self.name = str(path.relative_to(root))
        self.rows = read_epochs(path / "metrics.jsonl")
        config = path / "config.yaml"
        match = None
        if config.exists():
            match = re.search(r"^epochs: (\d+)$", config.read_text(errors="replace"), re.MULTILINE)

        # of a hundred runs, YAML's parser would take seconds
        self.epochs = int(match[1]) if match else None
        self.changed = last_change(path)
        self.state = state_of(path)

        here = (
            self.state != "running"
            and f" on {socket.gethostname()} " in (path / LOCK_FILE).read_text()
        )
        self.over = self.state != "running" and (here or time.time() - self.changed > DAY)

    def best(self) -> tuple[str, float | None]:
        """Return name and value of the metric that chose the best checkpoint, in its epoch.

        Without one, return the same as `objective`.
        """
        criterion = (read_json(self.path / "data.json") or {}).get("criterion")
        links = [
            link.resolve().stem
            for link in self.path.glob("checkpoints/best.*")
            if link.suffix != ".sha256"
        ]
        evaluations = read_evaluations(self.path / "metrics.jsonl")
        rows = {f"step_{row.get('step', 0):08}": row for row in reversed(evaluations)}
        chosen = next((rows[link] for link in links if link in rows), {})
        if criterion and criterion in chosen:
            return criterion, chosen[criterion]
        return objective(self.path / "metrics.jsonl", "auto")

    def is_removable(self) -> bool:
        """Return whether it is over, in `root` itself, and has neither epoch nor checkpoint."""
        linked = self.path.is_symlink() or (self.path.parent.is_symlink() and "/" in self.name)
        results = read_epochs(self.path / "metrics.jsonl") or any(self.path.glob("checkpoints/*"))
        return self.over and not linked and not results

    def remove(self) -> bool:
        """Remove the directory, unless a launch writes in it, or has since it was read.

        Return whether it is removed.

        Raises:
            ConfigError: it cannot be removed.
        """
        removed = self.path.with_name(f".removed-{self.path.name}")
        with reserved(self.path) as free:
            if not (free and self.is_removable()):
                return False
            try:
                self.path.rename(removed)  # a new launch may then use the name
                shutil.rmtree(removed)  # does not follow symbolic links
            except OSError as error:
                raise ConfigError(f"{self.path}: cannot be removed ({error.strerror})") from None
        return True


def find_runs(root: Path) -> list[Run]:
    """Return the runs in runs_dir and in directories of sweeps there, the last changed one last.

    Raises:
        ConfigError: it is no directory, or it is not readable. If nothing is there, there are no
            runs.
    """
    if root.exists() and not (root.is_dir() and os.access(root, os.R_OK | os.X_OK)):
        raise ConfigError(
            f"--runs-dir {root}: is not a directory that can be read. Use the runs_dir of your runs"
        )
    folders = [
        file.parent for depth in ("*", "*/*") for file in root.glob(f"{depth}/{LAUNCH_FILE}")
    ]
    readable = [folder for folder in folders if os.access(folder, os.R_OK | os.X_OK)]
    return sorted((Run(root, folder) for folder in readable), key=lambda run: run.changed)


def state_of(path: Path) -> str:
    """Return the state of the run in a directory, as `Run.state`."""
    status = (read_json(path / "status.json") or {}).get("status", "not started")
    with reserved(path) as free:
        if not free:
            return "running"
        return "killed" if status == "running" else status


@contextmanager
def reserved(path: Path) -> Generator[bool]:
    """Keep launches from writing in a run directory during the body, if none does now.

    Yield whether that worked.
    """
    try:
        descriptor = os.open(path / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # launches need an exclusive lock
        free = True
    except OSError:
        free = False
    try:
        yield free
    finally:
        os.close(descriptor)
