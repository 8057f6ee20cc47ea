"""A checkpoint of one file: the full state, of which rank 0 collects a copy, written by torch.save and read weights-only."""

import copy
from collections.abc import Iterable, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch

from ddp_lab.checkpoints.state import KEYS, Shapes, State, check_shapes
from ddp_lab.config.errors import ConfigError
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.sharding import local
from ddp_lab.training.optimizer import match_strides, state_tensors
from ddp_lab.training.progress import Progress

EXPECTED = "a checkpoint step_* or best.* from a run's directory checkpoints"


def copy_full(state: State, progress: Progress) -> dict[str, Any] | None:
    """Return on rank 0 a copy of the full state, which training does not change; None on the other ranks. Collective."""
    averages = {} if state.ema is None else {"ema": state.ema.state_dict()}
    held = {"scheduler": state.scheduler.state_dict(), **state.strategy.state_dict(state.optimizer)}
    if state.strategy.runtime.rank != 0:
        return None
    # `state_dict` does not copy tensors on the host (AdamW's `step`, also on GPUs), which the next step changes.
    full = copied(held, storages_on_host(state.strategy, state.optimizer)) | averages
    return in_model_order(full, state.shapes) | {"progress": asdict(progress), "seed": state.seed}


def storages_on_host(strategy: Strategy, optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the addresses of this rank's tensors in host memory that the next step changes."""
    tensors = [*strategy.module.state_dict().values(), *(value for _, _, value in state_tensors(optimizer))]
    own = [local(tensor) for tensor in tensors]
    return {tensor.untyped_storage().data_ptr() for tensor in own if tensor.device.type == "cpu"}


def copied(state: Any, storages: Set[int]) -> Any:
    """Return a deep copy of a state in which tensors are shared, but for those with one of these storages.

    The tensors of a GPU are copies already, and copying them again takes 0.2 s for ResNet-18 with momentum.
    """
    if isinstance(state, torch.Tensor):
        return state.clone() if state.untyped_storage().data_ptr() in storages else state
    if isinstance(state, dict):
        return {key: copied(value, storages) for key, value in cast("dict[Any, Any]", state).items()}
    return copy.deepcopy(state)


def in_model_order(state: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a full state with its tensors in the model's order: the ranks of a pipeline collect them in another.

    Args:
        state: the keys "model" and "optimizer", and "ema" if the weights are averaged.
        names: of the model's tensors, in order.
    """
    places = {name: place for place, name in enumerate(names)}

    def ordered(found: Iterable[str]) -> list[str]:
        return sorted(found, key=lambda name: places.get(name, len(places)))

    optimizer = state["optimizer"]
    groups = [group | {"params": ordered(group["params"])} for group in optimizer["param_groups"]]
    weights = {key: {name: state[key][name] for name in ordered(state[key])} for key in ("model", "ema") if key in state}
    values = {name: optimizer["state"][name] for name in ordered(optimizer["state"])}
    return state | weights | {"optimizer": optimizer | {"state": values, "param_groups": groups}}


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
        try:
            self.state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            missing = {*KEYS, "model"} - self.state.keys()
        except Exception as error:  # the bytes of a file that was not written by torch.save may mean anything to the unpickler
            reason = f"{type(error).__name__} {error}".split("\n")[0]
            raise ConfigError(f"{self.about}: cannot be read as a checkpoint ({reason}). Use {EXPECTED}") from None
        if missing:
            lacks = ", ".join(sorted(missing))
            raise ConfigError(f"{self.about}: is not a checkpoint of ddp_lab: it lacks {lacks}. Use {EXPECTED}")
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
