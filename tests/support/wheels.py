"""A fresh environment with ddp_lab installed from its wheel, as for users who have no clone."""

import os
import shutil
import site
import subprocess
import sys
import venv
from importlib.metadata import PathDistribution
from pathlib import Path
from zipfile import ZipFile

from launches import ROOT

# what pip writes for a console script
SCRIPT = "#!{}\nimport sys\nfrom {} import {}\nsys.exit({}())\n"


def copy_tree(to: Path) -> None:
    """Copy the files that git tracks, as they are, and untracked files that are not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():  # it may be deleted
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name, follow_symlinks=False)


def build_wheel(folder: Path) -> Path:
    """Build the wheel of a copy of this tree, offline.

    A build in the tree itself would leave files there.
    """
    copy_tree(folder / "source")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    done = subprocess.run(
        [*command, f"--wheel-dir={folder}", str(folder / "source")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(folder / "source")
    (wheel,) = folder.glob("*.whl")
    return wheel


class Environment:
    """A virtual environment with the packages of this one, and the wheel, if any.

    An editable install has no effect there.

    A .pth file names the folder of those packages. The .pth files in that folder, such as that of
    an editable install, are only read where it is a site directory itself.
    """

    def __init__(self, folder: Path, wheel: Path | None = None):
        venv.create(folder, with_pip=False, symlinks=True)
        self.programs = folder / "bin"
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
        scripts = {"torchrun": "torch.distributed.run:main", "pip": "pip._internal.cli.main:main"}
        if wheel:
            # a wheel of pure Python is installed by unpacking it; pip takes seconds longer
            ZipFile(wheel).extractall(packages)
            (installed,) = packages.glob("ddp_lab-*.dist-info")
            scripts |= {
                script.name: script.value for script in PathDistribution(installed).entry_points
            }
        for name, target in scripts.items():
            module, function = target.split(":")
            (self.programs / name).write_text(
                SCRIPT.format(self.programs / "python", module, function, function)
            )
            (self.programs / name).chmod(0o755)

    def run(self, command: str, cwd: Path, timeout: float = 240) -> subprocess.CompletedProcess:
        """Run shell commands in a directory, in new interpreters without PYTHONPATH."""
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        env |= {
            "PATH": f"{self.programs}{os.pathsep}{env['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        shell = ["bash", "-euo", "pipefail", "-c", command]
        return subprocess.run(
            shell, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout
        )
