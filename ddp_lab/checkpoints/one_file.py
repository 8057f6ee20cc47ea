"""A checkpoint of one file: the full state, of which rank 0 collects a copy, written by torch.save and read weights-only."""

from collections.abc import Callable
from pathlib import Path

import torch

from ddp_lab.checkpoints.files import write_file
from ddp_lab.checkpoints.saved import SavedCheckpoint, require_keys
from ddp_lab.checkpoints.state import KEYS, State, Write, collect, content_of, merge
from ddp_lab.strategies.sharding import local, shard_like
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


class FullCheckpoint(SavedCheckpoint):
    """A checkpoint of one file in host memory. Only tensors and plain values are read, so a file cannot execute code."""

    def open(self) -> None:
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        require_keys(state, {*KEYS, "model"})
        held = {"model": state.pop("model"), "ema": state.pop("ema", {})}
        held |= {f"optimizer.{name}": values for name, values in state["optimizer"]["state"].items()}
        pairs = {f"{part}.{name}": value for part, values in held.items() for name, value in values.items()}
        self.state, self.tensors = state, {key: value for key, value in pairs.items() if torch.is_tensor(value)}

    @torch.no_grad()
    def read(self, tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            local(tensor).copy_(local(shard_like(self.tensors[key], tensor)))
