"""Fault: a cuDNN or NCCL that takes the place of the wheel's, through LD_LIBRARY_PATH.

cuDNN loads its parts by name when they are first needed, and NCCL its plugins. The loader looks for
them in LD_LIBRARY_PATH first. Another version there is slower, fails, or mixes with the wheel's.
"""

import importlib.util
import os
import re
from pathlib import Path

from ddp_lab.launchers.preflight import Finding

ABOUT = "libraries"
MAPS = Path("/proc/self/maps")  # the files that this process has loaded
# the names of the packages in the wheels' folder `nvidia`, and what their files begin with
LIBRARIES = {"cudnn": ("libcudnn", "cuDNN"), "nccl": ("libnccl", "NCCL")}


def check_libraries() -> Finding:
    """Return a finding about libraries that take the place of the wheels'."""
    problems: list[str] = []
    for package, (prefix, name) in LIBRARIES.items():
        wheel = folder_of_wheel(package)
        if wheel is None:
            continue
        shadows = shadowing(prefix, wheel)
        problems += [
            f"{name} of {folder} ({', '.join(files)}) comes before the wheel's in {wheel}"
            for folder, files in shadows.items()
        ]
        problems += [
            f"this process has loaded {file}, not the {name} of {wheel}"
            for file in loaded(prefix)
            if file.parent.resolve() != wheel.resolve() and file.parent not in shadows
        ]
    if problems:
        return Finding(
            "warning",
            ABOUT,
            f"{'; '.join(problems)}. Unset LD_LIBRARY_PATH and LD_PRELOAD, or remove the folder "
            "from them, also from the modules that a cluster loads",
        )
    return Finding("ok", ABOUT, "no other cuDNN or NCCL takes the place of the wheels'")


def folder_of_wheel(package: str) -> Path | None:
    """Return the folder with the libraries of a wheel of NVIDIA's; None if it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    folders = [Path(place, package, "lib") for place in places or ()]
    return next((folder for folder in folders if folder.is_dir()), None)


def shadowing(prefix: str, wheel: Path) -> dict[Path, list[str]]:
    """Return the folders of LD_LIBRARY_PATH and LD_PRELOAD with libraries that the wheel has, too.

    Args:
        prefix: what the names of the libraries begin with.
        wheel: folder of the wheel's libraries.

    Returns:
        The names of the libraries, by folder.
    """
    names = {file.name for file in wheel.glob(f"{prefix}*.so*")}
    shadows: dict[Path, list[str]] = {}
    for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        folder = Path(entry or ".")
        same = sorted(name for name in names if (folder / name).exists()) if entry else []
        if same and folder.resolve() != wheel.resolve():
            shadows[folder] = same
    for entry in re.split("[: ]", os.environ.get("LD_PRELOAD", "")):
        file = Path(entry)
        if file.name in names and file.parent.resolve() != wheel.resolve():
            shadows.setdefault(file.parent, []).append(file.name)
    return shadows


def loaded(prefix: str) -> list[Path]:
    """Return the libraries that this process has loaded whose names begin with a prefix."""
    if not MAPS.exists():
        return []
    paths = {line.split(maxsplit=5)[-1] for line in MAPS.read_text().splitlines() if "/" in line}
    return sorted(Path(path) for path in paths if Path(path).name.startswith(prefix))
