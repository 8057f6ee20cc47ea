"""Launches of `ddp-lab doctor --fabric` in worlds of the tests' ranks, with one fault each."""

import contextlib
import errno
import functools
import io
import os
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_lab.commands import doctor
from ddp_lab.config import causes
from ddp_lab.launchers.command import command
from ddp_lab.launchers.fabric import examine, libraries, links, transfer
from ddp_lab.launchers.fabric.transfer import Meeting, measure_pair


@dataclass
class Case:
    """A launch with a fault.

    Attributes:
        overrides: of the command.
        env: environment variables; FOLDER is replaced by a directory of the case.
        free: free bytes of /dev/shm.
        options: arguments of `Options`, which replace parts of the check.
        nvidia_smi: whether a fake one, in FOLDER/bin, is on the PATH.
        sys: whether FOLDER/sys takes the place of /sys.
        peers: whether the ranks count as GPUs with direct access to each other.
        maps: whether FOLDER/maps takes the place of /proc/self/maps, and FOLDER/wheel that of the
            folder with the wheels' libraries.
    """

    overrides: str = ""
    env: dict[str, str] = field(default_factory=dict)
    free: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    nvidia_smi: bool = False
    sys: bool = False
    peers: bool = False
    maps: bool = False


@dataclass
class Report:
    """How a rank has ended.

    Attributes:
        code: exit code.
        output, errors: what it has printed.
        seconds: that it took.
    """

    code: object
    output: str
    errors: str
    seconds: float

    def lines(self, about: str) -> list[str]:
        """Return the findings about something, with their levels."""
        return [line for line in self.output.splitlines() if line[9:].startswith(f"{about}: ")]


def run_cases(cases: dict[str, Case], root: Path) -> dict[str, Report]:
    """Run cases one after another on this rank, each in a folder of its own."""
    return {name: run_case(case, root / name.replace(" ", "_")) for name, case in cases.items()}


def run_case(case: Case, folder: Path) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        for key, value in case.env.items():
            patch.setenv(key, value.replace("FOLDER", str(folder)))
        if case.nvidia_smi:
            patch.setenv("PATH", f"{folder}/bin{os.pathsep}{os.environ['PATH']}")
        if case.sys:
            patch.setattr(links, "SYS", folder / "sys")
        if case.peers:
            patch.setattr(examine, "has_peer_access", lambda runtime: True)
        if case.maps:
            patch.setattr(libraries, "MAPS", folder / "maps")
            patch.setattr(libraries, "folder_of_wheel", lambda package: folder / "wheel")
        if case.free is not None:
            patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=case.free))
        patch.setattr(examine, "Options", functools.partial(examine.Options, **case.options))
        patch.setattr(causes, "WAIT_FOR_CAUSE", 0.0)
        patch.setattr("faulthandler.enable", lambda: None)
        return run_doctor(*case.overrides.split(), f"runs_dir={folder}/runs", "device=cpu")


def run_doctor(*overrides: str) -> Report:
    """Run the command on this rank."""
    start = time.monotonic()
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        tempfile.TemporaryFile("w+") as reported,
        contextlib.redirect_stderr(reported),
    ):
        try:
            with command():
                doctor.main(["--fabric", *overrides])
            code = 0
        except SystemExit as ended:
            code = ended.code
        reported.seek(0)
        errors = reported.read()
    return Report(code, printed.getvalue(), errors, time.monotonic() - start)


def no_locks(file: Any, operation: int) -> None:
    """Answer as a file system without locks."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def locks_of_this_machine(file: Any, operation: int) -> None:
    """Grant each lock, as a file system whose locks do not reach other machines."""


def stops(kept: dict[str, Any], meeting: Meeting) -> float:
    """Stop the process of rank 2 when it meets rank 1, as a GPU that does not answer any more."""
    if meeting.pair == (1, 2) and meeting.role == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return measure_pair(kept, meeting)


def is_slow(kept: dict[str, Any], meeting: Meeting) -> float:
    """Wait before each exchange of ranks 0 and 1."""
    if meeting.pair != (0, 1):
        return measure_pair(kept, meeting)
    exchange = transfer.dist.batch_isend_irecv

    def late(operations: Any) -> Any:
        time.sleep(0.3)
        return exchange(operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer.dist, "batch_isend_irecv", late)
        return measure_pair(kept, meeting)


def needs_detour(kept: dict[str, Any], meeting: Meeting) -> float:
    """Fail like a GPU whose direct access is blocked, unless NCCL does without it."""
    if os.environ.get("NCCL_P2P_DISABLE") != "1":
        raise RuntimeError("no direct access")
    return measure_pair(kept, meeting)


def garbles(kept: dict[str, Any], meeting: Meeting) -> float:
    """Let zeros arrive, as through an IOMMU that does not know the address."""
    exchange = transfer.dist.batch_isend_irecv

    def garbled(operations: Any) -> Any:
        works = exchange(operations)
        for work in works:
            work.wait()
        operations[1].tensor.zero_()
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer.dist, "batch_isend_irecv", garbled)
        return measure_pair(kept, meeting)
