"""What a sharded checkpoint contains, saved and loaded: a rank's tensors by key, and the optimizer's state without tensors."""

from collections.abc import Iterable
from typing import Any

import torch

from ddp_lab.resilience.same_optimizer import check_optimizer
from ddp_lab.resilience.sharded_read import ShardedCheckpoint
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.ema import EMA

Optimizer = torch.optim.Optimizer


def tensors_to_save(
    strategy: Strategy, optimizer: Optimizer, ema: EMA | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of this rank by key, and its optimizer's state without tensors. Nothing is copied.

    Buffers are those of replica 0 only: within an epoch BatchNorm's statistics differ between replicas.
    """
    model, state = strategy.local_model_state(), strategy.local_optimizer_state(optimizer)
    left_out = {name for name, _ in strategy.module.named_buffers()} if strategy.dp_rank > 0 else set[str]()
    tensors = weights("model", model) | (weights("ema", averages(ema, model)) if ema else {})
    tensors = {key: tensor for key, tensor in tensors.items() if key.partition(".")[2] not in left_out}
    plain = {
        name: {key: value for key, value in held.items() if not torch.is_tensor(value)} for name, held in state["state"].items()
    }
    groups = [{key: on_host(value) for key, value in group.items()} for group in state["param_groups"]]
    return tensors | optimizer_tensors(state), {"state": plain, "param_groups": groups}


def weights(section: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the model by key."""
    return {f"{section}.{name}": tensor for name, tensor in state.items()}


def averages(ema: EMA, model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the averages by name, without those of buffers that checkpoints do not contain."""
    return {name: tensor for name, tensor in ema.shards().items() if name in model}


def optimizer_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors in the optimizer's state by key."""
    values = ((f"optimizer.{name}.{key}", value) for name, held in state["state"].items() for key, value in held.items())
    return {key: value for key, value in values if torch.is_tensor(value)}


def on_host(value: Any) -> Any:
    """Return a tensor on the host; anything else as it is. Learning rates are tensors on the GPU with CUDA graphs."""
    return value.cpu() if torch.is_tensor(value) else value


def collect(optimizers: list[dict[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """Merge the ranks' optimizer states without tensors. A pipeline's ranks have different parameters, replicas the same.

    Args:
        optimizers: as from `tensors_to_save`, of each rank; none on ranks other than 0.
        names: the tensors of the complete model, in its order.
    """
    groups = [list(same) for same in zip(*(part["param_groups"] for part in optimizers), strict=True)]
    held = [{name for group in same for name in group["params"]} for same in groups]
    return {
        "state": {name: values for part in optimizers for name, values in part["state"].items() if values},
        "param_groups": [
            same[0] | {"params": [name for name in names if name in own]} for same, own in zip(groups, held, strict=True)
        ],
    }


def load_sharded(
    path: str, shapes: dict[str, tuple[int, ...]], strategy: Strategy, optimizer: Optimizer, ema: EMA | None
) -> dict[str, Any]:
    """Load a sharded checkpoint into model, optimizer and averages, in place, and return its state without tensors.

    Args:
        shapes: the shape of each tensor of the full model, by name.

    Raises:
        ConfigError: the checkpoint is not valid, or is of another model or optimizer.
    """
    saved = ShardedCheckpoint(path)
    saved.check(shapes)
    check_optimizer(path, saved.state["optimizer"]["param_groups"], strategy, optimizer)
    read_into(saved, strategy, optimizer, ema)
    return saved.state | ({"ema": True} if saved.has("ema") else {})


def read_into(saved: ShardedCheckpoint, strategy: Strategy, optimizer: Optimizer, ema: EMA | None) -> None:
    """Read this rank's part of a sharded checkpoint, in place: model, optimizer and averages."""
    model = strategy.local_model_state()
    tensors = weights("model", model)
    if ema and saved.has("ema"):
        tensors |= weights("ema", averages(ema, model))
    plain: dict[str, dict[str, Any]] = saved.state["optimizer"]["state"]
    # SGD without momentum has no state, in the checkpoint or in this launch.
    if (saved.has("optimizer") or plain) and optimizer.defaults.get("momentum") != 0:
        state = strategy.local_optimizer_state(optimizer)
        tensors |= {key: tensor for key, tensor in optimizer_tensors(state).items() if key in saved.shapes}
        for name, values in plain.items():
            state["state"].get(name, {}).update(values)
        forget_unsaved(saved, strategy, optimizer)
    saved.read(tensors)
    if ema and not saved.has("ema"):
        ema.begin_again()


def forget_unsaved(saved: ShardedCheckpoint, strategy: Strategy, optimizer: Optimizer) -> None:
    """Remove the initial state of parameters that had none when the checkpoint was written, because they had no gradient."""
    written = {key.removeprefix("optimizer.").rpartition(".")[0] for key in saved.shapes if key.startswith("optimizer.")}
    for name, parameter in strategy.module.named_parameters():
        if name not in written and name not in saved.state["optimizer"]["state"]:
            optimizer.state.pop(parameter, None)
