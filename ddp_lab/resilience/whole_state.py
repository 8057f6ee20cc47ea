"""What a whole checkpoint contains, saved and loaded: the complete state, of which rank 0 collects a copy."""

import copy
from collections.abc import Iterable, Set
from typing import Any, cast

import torch

from ddp_lab.resilience.checkpoint_files import load_checkpoint
from ddp_lab.resilience.same_optimizer import check_optimizer
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.sharding import local
from ddp_lab.training.ema import EMA
from ddp_lab.training.optimizer import match_strides, state_tensors

Optimizer = torch.optim.Optimizer


def complete_state(
    strategy: Strategy, optimizer: Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR, ema: EMA | None
) -> dict[str, Any] | None:
    """Return on rank 0 the complete state of model, optimizer, scheduler and averages; None on the other ranks. Collective.

    Training does not change what is returned.
    """
    averages = {} if ema is None else {"ema": ema.state_dict()}
    state = {"scheduler": scheduler.state_dict(), **strategy.state_dict(optimizer)}
    if strategy.runtime.rank != 0:
        return None
    # `state_dict` does not copy tensors on the host (AdamW's `step`, also on GPUs), which the next step changes.
    return copied(state, storages_on_host(strategy, optimizer)) | averages


def in_model_order(state: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a complete state with its tensors in the model's order: the ranks of a pipeline collect them in another.

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


def load_whole(
    path: str, shapes: dict[str, tuple[int, ...]], strategy: Strategy, optimizer: Optimizer, ema: EMA | None
) -> dict[str, Any]:
    """Load a checkpoint of one file into model, optimizer and averages, and return its state. Collective.

    Averages that it lacks begin at its weights.

    Args:
        shapes: the shape of each tensor of the full model, by name.

    Raises:
        ConfigError: the file is not valid, or is of another model or optimizer.
    """
    state = load_checkpoint(path, shapes)
    check_optimizer(path, state["optimizer"]["param_groups"], strategy, optimizer)
    if ema is not None:
        ema.load_state_dict(state.get("ema", state["model"]))
    strategy.load_state_dict(optimizer, state)
    match_strides(optimizer)
    return state


def storages_on_host(strategy: Strategy, optimizer: Optimizer) -> set[int]:
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
