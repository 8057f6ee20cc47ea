"""A checkpoint of one file: the full state, of which rank 0 collects a copy, written by torch.save and read weights-only."""

import copy
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ddp_lab.checkpoints.files import write_file
from ddp_lab.checkpoints.state import KEYS, Shapes, State, Write, check_shapes, reading, require_keys
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.optimizer import match_strides
from ddp_lab.training.progress import Progress


def copy_full(state: State, progress: Progress) -> Write | None:
    """Collect a copy of the full state on rank 0, and return there what writes it; None on the other ranks. Collective."""
    averages = {} if state.ema is None else {"ema": state.ema.state_dict()}
    held = {"scheduler": state.scheduler.state_dict(), **state.strategy.state_dict(state.optimizer)}
    if state.strategy.runtime.rank != 0:
        return None
    # Tensors on the host are those that the next step changes: all of them on CPUs, and on GPUs for example AdamW's `step`.
    full = copy.deepcopy(held) | averages | {"progress": asdict(progress), "seed": state.seed}

    def write(path: Path, before: Callable[[], None]) -> None:
        before()
        write_file(path, full)

    return write


class FullCheckpoint:
    """A checkpoint of one file in host memory. Only tensors and plain values are read, so a file cannot execute code.

    Args:
        path: the file, whose SHA-256 has been checked if it has one.
        key: what the user sets to the path, for messages.

    Attributes:
        state: the keys "progress", "seed", "model", "optimizer" and "scheduler"; "ema" if the weights are averaged.
        has_averages: whether the weights are averaged.

    Raises:
        ConfigError: the file is not a checkpoint of ddp_lab.
    """

    def __init__(self, path: Path, key: str = "resume="):
        self.about = f"{key}{path}"
        with reading(self.about):
            self.state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            require_keys(self.state, {*KEYS, "model"})
        self.has_averages = "ema" in self.state

    def check(self, shapes: Shapes) -> None:
        """Check that the weights are those of a model. Raises a ConfigError that names the first tensor that differs."""
        for weights in filter(None, (self.state["model"], self.state.get("ema"))):
            check_shapes(self.about, {name: tuple(tensor.shape) for name, tensor in weights.items()}, shapes)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights to evaluate: their averages if there are any."""
        return self.state.get("ema", self.state["model"])

    def load_weights(self, strategy: Strategy) -> None:
        """Load the weights to evaluate. Collective."""
        strategy.load_model_state(self.weights())

    def load(self, state: State) -> None:
        """Load model, optimizer and averages, which start from the weights if the checkpoint has none. Collective."""
        if state.ema is not None:
            state.ema.load_state_dict(self.state.get("ema", self.state["model"]))
        state.strategy.load_state_dict(state.optimizer, self.state)
        match_strides(state.optimizer)
