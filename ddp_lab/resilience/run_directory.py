"""The run directory: the same one for every rank on every node, and for every restart."""

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from ddp_lab.config.errors import ConfigError
from ddp_lab.observe.log import log
from ddp_lab.world.process import replace_text, run_id

# the launchers import this module, and --help loads the launchers: importing torch would add 1.5 s
if TYPE_CHECKING:
    from ddp_lab.training.progress import Progress
    from ddp_lab.world.runtime import Runtime

# contains the identifiers of the launch, by which a restart finds its directory
LAUNCH_FILE = ".launch"
LOCK_FILE = ".lock"
# `ddp-lab watch` writes the file REQUEST in the folder STACKS to ask the ranks for their stacks
STACKS = "stacks"
REQUEST = "request"
LOCK_WAIT = 2.0  # seconds that a launch waits for the lock
# the same after a restart: enough for the ranks that torchrun has just terminated to exit
RESTART_WAIT = 15.0


class RunDir:
    """A run directory that rank 0 chooses, creates and locks. Collective.

    Args:
        root: the config's `runs_dir`, which contains the run directories.
        name: the directory's name; None: the name that this launch used before a restart, or else
            `label` and the time.
        resume: the config's `resume`: auto, never or a path.
        label: the beginning of a generated name.

    Attributes:
        path: `runs_dir`/`name`.
        failure: the first line of the previous attempt's error message; None if it did not fail.

    Raises:
        ConfigError: the directory cannot be made, resume=never would overwrite a run, or another
            launch writes in it.
    """

    def __init__(self, runtime: "Runtime", root: Path, name: str | None, resume: str, label: str):
        _ = runtime.launch  # all ranks take part
        chosen, self.failure = runtime.broadcast_from_rank0(
            "run_dir", lambda: self._decide(runtime, root, name, resume, label)
        )
        self.path = root / chosen
        if runtime.local_rank == 0:
            # for a node that does not share rank 0's disk
            self.path.mkdir(parents=True, exist_ok=True)

    def _decide(
        self, runtime: "Runtime", root: Path, name: str | None, resume: str, label: str
    ) -> list[Any]:
        launch = runtime.launch
        try:
            root.mkdir(parents=True, exist_ok=True)
            restarted = find_launch(root, launch) if runtime.under_torchrun else None
            name = name or restarted or make_unused(root, label)
            path = root / name
            path.mkdir(exist_ok=True)

            self._lock = lock(path, RESTART_WAIT if name == restarted else LOCK_WAIT)
            if resume == "never" and name != restarted and (path / "config.yaml").exists():
                raise ConfigError(
                    f"resume=never: {path} already contains a run. Choose another name, remove "
                    "that directory, or use resume=auto to resume the run"
                )

            failure = read_json(path / "failure.json")  # of an earlier attempt
            (path / "failure.json").unlink(missing_ok=True)
            if (path / "flight_recorder").exists():
                from ddp_lab.resilience import flight_recorder

                flight_recorder.set_aside(path)
            (path / LAUNCH_FILE).write_text(launch)
        except OSError as error:
            from ddp_lab.world.write_errors import explain_write

            reason, remedy = explain_write(error, root)
            raise ConfigError(
                f"runs_dir={root}: cannot make the run directory there ({reason}). {remedy}"
            ) from None
        return [name, failure and failure["message"].splitlines()[0]]

    def end(
        self, status: Literal["finished", "preempted", "interrupted"], progress: "Progress"
    ) -> None:
        """Write the outcome of the launch. Call it on rank 0.

        Args:
            status: the outcome.
            progress: the progress at which training ended or, after a preemption, that of the last
                checkpoint.
        """
        done = status == "finished"  # `progress` is then after an evaluation
        epoch = progress.evaluated_epoch if done else progress.epoch
        write_status(self.path, status, epoch, progress.step)
        if not done:
            log.info(
                f"{status} at {progress}; to resume, run the same command with "
                f"name={self.path.name} resume=auto"
            )


def lock(path: Path, wait: float) -> TextIO:
    """Make this process the directory's only writer.

    Args:
        path: the run directory.
        wait: seconds to wait for a process that holds the lock.

    Returns:
        The open lock file. The kernel releases the lock when the process ends, however it ends, or
        when the file is closed.

    Raises:
        ConfigError: another process still holds the lock after `wait` seconds.
    """
    file = (path / LOCK_FILE).open("a+")
    deadline = time.monotonic() + wait
    while True:
        try:
            # unlike flock, not inherited by the data loader's workers
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):  # POSIX allows either
            if time.monotonic() > deadline:
                file.seek(0)
                raise ConfigError(
                    f"name={path.name}: another launch is writing in {path} "
                    f"({file.read().strip()}). Wait until it ends, stop it, or choose another name"
                ) from None
            time.sleep(0.2)

    file.truncate(0)
    file.write(
        f"pid {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}"
    )
    file.flush()
    return file


def find_launch(root: Path, launch: str) -> str | None:
    """Return the name of the run directory of a launch before a restart; None if there is none.

    Args:
        root: the config's `runs_dir`.
        launch: `Runtime.launch`. One identifier in common is enough: nodes may have left the
            launch, or joined it.
    """
    agents = set(launch.splitlines())
    starts: list[tuple[float, str]] = []
    for folder in root.glob("*"):  # none if there is no root yet
        file = folder / LAUNCH_FILE
        # A file that is missing, has just been removed, or is another user's is not this launch's.
        with suppress(OSError):
            if agents & set(file.read_text().splitlines()):
                starts.append((file.stat().st_mtime, folder.name))
    return max(starts)[1] if starts else None


def make_unused(root: Path, label: str) -> str:
    """Create a new directory named after `label` and the time; return its name."""
    base = f"{label}-{datetime.now():%Y%m%d-%H%M%S}"
    attempt = 0
    while True:
        attempt += 1
        name = base if attempt == 1 else f"{base}-{attempt}"
        with suppress(FileExistsError):
            (root / name).mkdir()
            return name


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a JSON file atomically, as other processes may read it at any time."""
    replace_text(path, json.dumps(record))


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file; None if it is missing or incomplete."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write_status(
    path: Path,
    status: Literal["running", "preempted", "interrupted", "finished", "failed"],
    epoch: int,
    step: int,
    heartbeats: Path | None = None,
) -> None:
    """Write `status.json` for scripts, as torchrun's exit code does not distinguish outcomes.

    The outcome of a launch keeps the ranks that were slow at its end (`note_stragglers`).

    Args:
        path: the run directory. The file's key `launch` is torchrun's run id.
        status: the state of the launch.
        epoch: the last epoch that has been trained, at least in part.
        step: number of optimizer steps taken.
        heartbeats: the file of the heartbeats on node 0, while the launch is running.
    """
    record: dict[str, Any] = {"status": status, "epoch": epoch, "step": step, "launch": run_id()}
    record["time"] = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    if heartbeats:
        record["heartbeats"] = str(heartbeats)
    before = read_json(path / "status.json") or {}
    if status != "running" and "stragglers" in before:
        record["stragglers"] = before["stragglers"]
    write_json(path / "status.json", record)


def note_stragglers(path: Path, progress: "Progress", stragglers: list[dict[str, Any]]) -> None:
    """Write to `status.json` which ranks are slow now. Call it on rank 0 while the launch runs.

    Training continues if it cannot be written.

    Args:
        path: the run directory.
        progress: the position.
        stragglers: what is known of each.
    """
    record = read_json(path / "status.json") or {}
    record |= {"epoch": progress.epoch, "step": progress.step, "stragglers": stragglers}
    try:
        write_json(path / "status.json", record)
    except OSError as error:
        log.error(f"{path / 'status.json'} could not be written ({error.strerror or error})")
