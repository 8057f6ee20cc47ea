"""The space of caches: what killed builds have left is removed, and a new cache must fit."""

import shutil
import socket
from contextlib import suppress
from pathlib import Path

from PIL import Image

from ddp_lab.config.errors import NodeError
from ddp_lab.data.decode import FORMATS
from ddp_lab.data.record import locked

SAMPLE = 100  # images whose headers are read for the estimate


def remove_abandoned(folder: Path) -> None:
    """Remove the records in a cache directory whose build was killed."""
    for path in folder.glob("building-*.lock"):
        with suppress(OSError), locked(path, wait=False):  # not if its build is running, or is of another user
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)


def estimate_bytes(root: Path, names: list[str], channels: int, short_side: int) -> int:
    """Return the estimated size in bytes of the resized pixels of all images, from the shapes of some of them.

    Args:
        root: the directory of the images.
        names: their names.
        channels, short_side: as in `decode` and `resize`.
    """
    some = names[:: -(-len(names) // SAMPLE)]
    ratios = [ratio for ratio in (side_ratio(root / name) for name in some) if ratio]
    return round(channels * short_side**2 * sum(ratios) / max(1, len(ratios)) * len(names))


def side_ratio(path: Path) -> float | None:
    """Return the longer side of an image divided by the shorter one; None for a file that is not an image."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            return max(image.size) / min(image.size)
    except MemoryError:
        raise
    except Exception:  # of many kinds, as in `decode`, which reports them
        return None


def check_space(folder: Path, needed: int, where: str) -> None:
    """Check that a cache fits on the disk or in the shared memory of this machine.

    Args:
        folder: where it will be written; it may not exist yet.
        needed: its estimated size in bytes.
        where: key and value of the config that chose the place.

    Raises:
        NodeError: it does not fit.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise NodeError(
            f"{where}: the resized images need about {needed / 2**20:,.1f} MiB, but {existing} on {socket.gethostname()} has "
            f"{free / 2**20:,.1f} MiB free. Free some space, or use a smaller data.resize, another data.cache_dir or data.cache"
        )
