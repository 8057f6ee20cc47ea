"""Launches in a mount namespace of their own: what they mount, no other process sees."""

import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest
from launches import ROOT


def launch_where_mounted(
    mounted: str, *overrides: str, program: Sequence[str] = ("train.py",)
) -> subprocess.CompletedProcess[str]:
    """Run train.py on two ranks of torchrun after a mount, and return how it has ended.

    Skips the test if this process has not the right to mount.

    Args:
        mounted: the arguments of `mount`.
        overrides: of train.py.
        program: which is run in place of train.py, as arguments of torchrun.
    """
    namespace = ["unshare", "--mount", "sh", "-c", f'mount {mounted} && exec "$@"', "sh"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs the right to mount in a namespace of its own")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        *program,
    ]
    return subprocess.run(
        [*namespace, *launch, *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
