"""One directory for a run: the same for every rank of every node, and for every restart."""

import fcntl
import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddp_lab.config.errors import ConfigError
from ddp_lab.world.process import launch_id, run_id

if TYPE_CHECKING:  # the launchers read records by this file, and --help loads the launchers: torch would add its 1.5 s
    from ddp_lab.world.runtime import Runtime

LAUNCH_FILE = ".launch"  # holds the launch's id, by which a restart finds its directory again
LOCK_FILE = ".lock"
LOCK_WAIT = 15.0  # seconds: as long as the ranks that torchrun has just ended may take to be gone


class RunDir:
    """Chosen, made and locked by rank 0, and known to all ranks.

    Args:
        root: where run directories are made.
        name: the directory's; None: one made of `label` and the time, or what this launch had before a restart.
        resume: as in the config.

    Attributes:
        path: `runs_dir`/`name`.
        restarted: torchrun has started these ranks anew: the launch goes on with what it has written itself.
        attempt: names this start of the ranks, as no other's.
        failure: how the start before this one failed, in a line; None: it did not.

    Raises:
        ConfigError: the directory cannot be made, resume=never would write over a run, or another launch writes in it.
    """

    def __init__(self, runtime: "Runtime", root: Path, name: str | None, resume: str, label: str):
        decided = json.loads(runtime.agree("run_dir", lambda: json.dumps(self._decide(runtime, root, name, resume, label))))
        self.path, self.restarted, self.attempt = root / decided["name"], decided["restarted"], decided["attempt"]
        self.failure = decided["failure"]
        self.path.mkdir(parents=True, exist_ok=True)  # on a node that does not share rank 0's disk

    def _decide(self, runtime: "Runtime", root: Path, name: str | None, resume: str, label: str) -> dict[str, Any]:
        launch = launch_id()
        try:
            root.mkdir(parents=True, exist_ok=True)
            restarted = find_launch(root, launch) if runtime.under_torchrun else None
            name = name or restarted or make_unused(root, label)
            path = root / name
            path.mkdir(exist_ok=True)
            self._lock = lock(path)
            if resume == "never" and name != restarted and (path / "config.yaml").exists():
                raise ConfigError(
                    f"resume=never: {path} already holds a run. Choose another name, remove that directory, "
                    "or go on with it by resume=auto"
                )
            failure = read_json(path / "failure.json")  # an earlier attempt's
            (path / "failure.json").unlink(missing_ok=True)
            (path / LAUNCH_FILE).write_text(launch)
        except OSError as error:
            raise ConfigError(f"runs_dir={root}: cannot make the run directory there ({error.strerror})") from None
        attempt = f"{socket.gethostname()}-{os.getpid()}-{time.time()}"
        return {
            "name": name,
            "restarted": name == restarted,
            "attempt": attempt,
            "failure": failure and failure["message"].splitlines()[0],
        }


def lock(path: Path) -> Any:
    """Makes this process the directory's only writer for its life; the kernel lets go of it, however it ends.

    Raises:
        ConfigError: another process is, and stays it for LOCK_WAIT seconds.
    """
    file = (path / LOCK_FILE).open("a+")
    deadline = time.monotonic() + LOCK_WAIT
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock not shared with the loader's worker processes
            break
        except (BlockingIOError, PermissionError):  # POSIX has either
            if time.monotonic() > deadline:
                file.seek(0)
                raise ConfigError(
                    f"name={path.name}: another launch is writing in {path} ({file.read().strip()}). Wait for its end, stop "
                    "it, or choose another name"
                ) from None
            time.sleep(0.2)
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}")
    file.flush()
    return file


def find_launch(root: Path, launch: str) -> str | None:
    """The name of the directory that this launch has opened before."""
    files = sorted(root.glob(f"*/{LAUNCH_FILE}"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((file.parent.name for file in files if file.read_text() == launch), None)


def make_unused(root: Path, label: str) -> str:
    base, attempt = f"{label}-{datetime.now():%Y%m%d-%H%M%S}", 1
    while True:
        name = base if attempt == 1 else f"{base}-{attempt}"
        try:
            (root / name).mkdir()
        except FileExistsError:
            attempt += 1
            continue
        return name


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Whole or not at all: others read it at any time."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(record))
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no such file, or its writer is just writing."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write_status(path: Path, status: Literal["running", "preempted", "finished", "failed"], epoch: int, step: int) -> None:
    """`status.json`, for scripts: an exit code of torchrun does not tell these apart. `launch` is torchrun's run id."""
    now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    write_json(path / "status.json", {"status": status, "epoch": epoch, "step": step, "time": now, "launch": run_id()})
