"""Launches in a mount namespace of their own: what they mount, no other process sees."""

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from launches import ROOT, SUPPORT
from warm import programs

WAIT = ["sh", "-c", "echo ready && exec sleep infinity"]


@contextmanager
def mounted_by_a_process(mounted: str) -> Iterator[int]:
    """Return the id of a process in a mount namespace of its own, after a mount.

    Skips the test if this process has not the right to mount.

    Args:
        mounted: the arguments of `mount`.
    """
    if not shutil.which("unshare"):
        pytest.skip("needs unshare")
    script = f'mount {mounted} && exec "$@"'
    keeper = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script, "sh", *WAIT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        if keeper.stdout.readline() != "ready\n":
            pytest.skip("needs the right to mount in a namespace of its own")
        yield keeper.pid
    finally:
        keeper.kill()
        keeper.communicate()


def launch_where_mounted(
    mounted: str, *overrides: str, program: Sequence[str] = ("train.py",), cold: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run train.py on two ranks of torchrun after a mount, and return how it has ended.

    Skips the test if this process has not the right to mount.

    Args:
        mounted: the arguments of `mount`.
        overrides: of train.py.
        program: which is run in place of train.py, as arguments of torchrun.
        cold: whether to start new interpreters, as from a shell.
    """
    launch = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", *program, *overrides]
    with mounted_by_a_process(mounted) as pid:
        command = [str(programs() / "python"), str(SUPPORT / "enter.py"), str(pid), *launch]
        if cold:
            entered = ["nsenter", f"--target={pid}", "--mount", f"--wd={ROOT}"]
            command = [*entered, sys.executable, "-m", *launch]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )
