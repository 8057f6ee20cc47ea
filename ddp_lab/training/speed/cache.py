"""The directory of compiled kernels, which later runs of the same work read instead of compiling again."""

import hashlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from ddp_lab.data.loader import Loader
from ddp_lab.training.step import Step

CODE = 2  # raised when other code is compiled for the same work, whose kernels are not in the cache then
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # torch reads it whenever it looks for a kernel


def cache_folder() -> Path:
    """Return the directory: ~/.cache/ddp_lab/compiled, unless the environment variable of torch names another.

    torch sets the variable itself, to its default in the directory of temporary files, as soon as an optimizer is constructed.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes long to import before an optimizer exists

    named = os.environ.get(VARIABLE)
    return Path(named) if named and named != default_cache_dir() else Path.home() / ".cache" / "ddp_lab" / "compiled"


@contextmanager
def kept_kernels() -> Generator[None]:
    """Let torch.compile keep its kernels in `cache_folder`, and not in a temporary directory, if that can be written."""
    folder, before = cache_folder(), os.environ.get(VARIABLE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home: torch's default, in the directory of temporary files
        yield
        return
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def mark_of(step: Step, loader: Loader) -> Path:
    """Return the file that exists if the kernels of this step with the batches of `loader` are in the cache.

    It has the duration of a step that is not compiled, in seconds.
    """
    device, strategy = step.strategy.device, step.strategy
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    work = [CODE, torch.__version__, name, strategy.name, strategy.axes, strategy.runtime.precision, step.accumulate]
    work.append(torch.get_float32_matmul_precision())
    work += [type(loader).__name__, loader.local_batch_size, type(step.optimizer).__name__, step.ema is None, step.mix is None]
    text = repr([*work, strategy.module])
    return cache_folder() / "ddp_lab" / hashlib.sha256(text.encode()).hexdigest()[:16]


def leave_mark(mark: Path, seconds: float) -> None:
    """Create the file `mark`, if the directory can be written."""
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(repr(seconds))
    except OSError:
        pass


def read_mark(mark: Path) -> float | None:
    """Return the duration in a mark; None if there is no mark, or none that can be read."""
    try:
        return float(mark.read_text())
    except (OSError, ValueError):
        return None
