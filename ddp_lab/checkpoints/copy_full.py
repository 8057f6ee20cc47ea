"""The copy of the full state for a checkpoint of one file, which rank 0 collects and writes (one_file.py reads it)."""

from collections.abc import Callable
from pathlib import Path

from ddp_lab.checkpoints.files import write_file
from ddp_lab.checkpoints.state import State, Write, collect, content_of, merge
from ddp_lab.training.progress import Progress


def copy_full(state: State, progress: Progress) -> Write | None:
    """Collect a copy of the full state on rank 0, and return there what writes it; None on the other ranks. Collective."""
    full, rests = collect(state.strategy, *state.part(progress))
    if not rests:
        return None

    def write(path: Path, before: Callable[[], None]) -> None:
        before()
        write_file(path, content_of(full, merge(rests)))

    return write
