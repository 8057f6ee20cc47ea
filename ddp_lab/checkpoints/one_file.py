"""A checkpoint of one file, written by torch.save (copy_full in state.py) and read weights-only."""

import torch

from ddp_lab.checkpoints.saved import SavedCheckpoint, require_keys
from ddp_lab.checkpoints.state import KEYS
from ddp_lab.strategies.dtensor import local, shard_like


class FullCheckpoint(SavedCheckpoint):
    """A checkpoint of one file in host memory.

    Only tensors and plain values are read, so a file cannot execute code.
    """

    def open(self) -> None:
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        require_keys(state, {*KEYS, "model"})
        parts = {"model": state.pop("model")}
        parts |= {name: state.pop(name, {}) for name in ("ema", "task")}
        parts |= {
            f"optimizer.{name}": values for name, values in state["optimizer"]["state"].items()
        }
        pairs = {
            f"{part}.{name}": value
            for part, values in parts.items()
            for name, value in values.items()
        }
        self.state = state
        self.tensors = {key: value for key, value in pairs.items() if torch.is_tensor(value)}

    @torch.no_grad()
    def read(self, tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            local(tensor).copy_(local(shard_like(self.tensors[key], tensor)))
