"""The arguments of a Lab and its trainers: what is allowed, and what is made of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml
from torch import nn

from ddp_lab.config.build import options
from ddp_lab.config.check import validate
from ddp_lab.config.errors import ConfigError
from ddp_lab.config.moved import MOVED
from ddp_lab.config.schema import Keys
from ddp_lab.config.types import (
    Checkpointing,
    Count,
    DeviceName,
    Fraction,
    LogEvery,
    NaturalNumber,
    Positive,
    Seed,
    Trackers,
)
from ddp_lab.data.trees import Tree, apply, leaves
from ddp_lab.lab.example import Example
from ddp_lab.models.chain import Chain
from ddp_lab.models.lazy import lazy_layers, materialise
from ddp_lab.models.make import as_chain
from ddp_lab.models.memory import give_own_memory
from ddp_lab.strategies.base import Strategy
from ddp_lab.tasks.base import LossFunction, Task
from ddp_lab.world.runtime import Runtime

if TYPE_CHECKING:
    from ddp_lab.training.callbacks import Callback
    from ddp_lab.training.gathered_metrics import GatheredMetrics

CONF = Path(__file__).parents[1] / "conf" / "strategy"


class LabKeys(Keys):
    """The plain arguments of `Lab`, as in `RunConfig`."""

    device: Literal["auto", "mps"] | DeviceName
    precision: Literal["float32", "bf16", "fp16"]
    seed: Seed
    timeout: Positive
    tracker: Trackers


class TrainerKeys(Keys):
    """The plain arguments of `Lab.trainer`."""

    batch_size: Count
    accumulate: Count
    max_grad_norm: Positive | None
    ema: Fraction | None
    ema_warmup: bool
    num_workers: NaturalNumber
    readers: Count
    loss_over_batch: bool
    checkpoint_activations: Checkpointing
    targets: str | int | None


class FitKeys(Keys):
    """The plain arguments of `Trainer.fit`."""

    epochs: Count | None
    log_every: LogEvery | None
    max_steps: Count | None


def find_strategy(strategy: str | type[Strategy], wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the config group of a strategy.

    Args:
        strategy: name of a file in conf/strategy, or a class, whose options have the defaults of
            its constructor.
        wanted: values of its keys in place of the defaults.

    Raises:
        ConfigError: there is no such strategy, or a key or value is not allowed.
    """
    given_class: Any = strategy  # what a user passes may be another class
    if isinstance(given_class, type) and issubclass(given_class, Strategy):
        node: dict[str, Any] = {"_target_": given_class}
    else:
        names = sorted(path.stem for path in CONF.glob("*.yaml"))
        if strategy not in names:
            raise ConfigError(
                f"strategy={strategy}: there is no such option; allowed: {', '.join(names)}, or a "
                "subclass of ddp_lab.strategies.base.Strategy"
            )
        node = yaml.safe_load((CONF / f"{strategy}.yaml").read_text())
    if moved := [key for key in wanted if f"strategy.{key}" in MOVED]:
        raise ConfigError(
            f"Lab(..., {moved[0]}={wanted[moved[0]]!r}): is no option of a strategy, but an "
            f"argument of lab.trainer(..., {moved[0]}={wanted[moved[0]]!r})"
        )
    keys = {key: value for key, value in node.items() if key != "_target_"} | wanted
    validate(options("strategy", node), keys, "strategy.")
    return node | wanted


def name_of_target(node: dict[str, Any]) -> dict[str, Any]:
    """Return a config group with the name of its class in place of the class."""
    target = node["_target_"]
    if isinstance(target, type):
        target = f"{target.__module__}.{target.__qualname__}"
    return {**node, "_target_": target}


def as_task(loss: LossFunction | Task) -> Task:
    """Return the task that a loss is or makes.

    Raises:
        ConfigError: it is neither a function nor a task, or has parameters that no optimizer gets.
    """
    if isinstance(loss, type) or not callable(loss):
        raise ConfigError(
            f"loss={loss}: must be a function of (outputs, targets), or a task such as "
            "tasks.Segmentation(); a class must be called first"
        )

    trained: list[str] = []
    if isinstance(loss, nn.Module):
        named = loss.named_parameters()
        trained = [name for name, parameter in named if parameter.requires_grad]
    if trained:
        raise ConfigError(
            f"loss={type(loss).__name__}: has the parameter {trained[0]}, which no optimizer would "
            "train. Make it a part of the model, whose outputs the loss gets, or freeze it by "
            "requires_grad_(False)"
        )
    return loss if isinstance(loss, Task) else Task(loss)


def make_further_metrics(
    metrics: Sequence[Any] | Mapping[str, Any], batch_size: int
) -> "GatheredMetrics | None":
    """Return the metrics of a trainer that are no sums; None if there are none.

    Args:
        metrics: of the user.
        batch_size: samples in a GLOBAL batch.

    Raises:
        ConfigError: `metrics` is neither a list nor a dict, or as `make_metrics`.
    """
    if not isinstance(metrics, (list, tuple, Mapping)):
        raise ConfigError(
            f"metrics={metrics}: must be a list of metrics of torchmetrics, or a dict of them by "
            "name"
        )
    if not metrics:
        return None
    from ddp_lab.training.gathered_metrics import make_metrics

    return make_metrics(metrics, batch_size)


def make_further_hooks(callbacks: Sequence[Any]) -> "list[Callback]":
    """Return the callbacks of a trainer as hooks.

    Raises:
        ConfigError: `callbacks` is no list, or as `make_callbacks`.
    """
    if not isinstance(callbacks, (list, tuple)):
        raise ConfigError(f"callbacks={callbacks}: must be a list of subclasses of ddp_lab.Hook")
    if not callbacks:
        return []
    from ddp_lab.training.callbacks import make_callbacks

    return make_callbacks(callbacks)


def form_of(model: nn.Module, example: Example | None) -> Tree:
    """Return inputs of two samples on the meta device; None: their form is not known.

    Args:
        model: of the user.
        example: of a sample; None: there is none.
    """
    if example is not None:
        return example.form
    if isinstance(model, Chain):
        return torch.empty(2, *model.input_shape, dtype=model.input_dtype, device="meta")
    return None


def require_module(model: Any) -> None:
    """Check what a user passes as the model.

    Raises:
        ConfigError: it is no module.
    """
    if isinstance(model, nn.Module):
        return
    got = type(model).__name__
    if isinstance(model, type):
        got = f"the class {model.__name__}. Call it: {model.__name__}(...)"
    raise ConfigError(f"model: must be a torch.nn.Module, got {got}")


def in_blocks(
    model: nn.Module, strategy: Strategy, example: Example | None, form: Tree
) -> nn.Module:
    """Return the model; a plain nn.Sequential as a Chain, if the strategy cuts or divides it.

    Args:
        model: of the user.
        strategy: before `partition`.
        example: of a sample; None: there is none.
        form: of the inputs, from `form_of`.

    Raises:
        ConfigError: lazy layers need an example.
    """
    give_own_memory(model, "the model")
    give_shapes(model, example)
    uses_blocks = strategy.cuts_model or strategy.divides_blocks
    if isinstance(model, Chain) or not uses_blocks or not isinstance(form, torch.Tensor):
        return model
    made = as_chain(model, tuple(form.shape[1:]))
    if isinstance(made, Chain):
        made.input_dtype = form.dtype
    return made


def give_shapes(model: nn.Module, example: Example | None) -> None:
    """Give lazy layers their parameters, by a forward pass of a sample.

    Args:
        model: of the user.
        example: of a sample; None: there is none.

    Raises:
        ConfigError: there are lazy layers and no sample, or the model cannot process it.
    """
    if (lazy := lazy_layers(model)) and example is None:
        raise ConfigError(
            f"the model: {lazy[0]} is a lazy layer, which has no shape before its first forward "
            "pass. Pass a sample for it: lab.trainer(..., example=dataset[0])"
        )
    if example is not None:
        materialise(model, apply(torch.zeros_like, example.inputs), "the model")


def require_same(model: nn.Module, runtime: Runtime) -> None:
    """Check that all ranks have constructed the same model. Collective.

    Raises:
        ConfigError: their weights differ.
    """
    tensors = (as_real(tensor) for tensor in model.state_dict().values() if not tensor.is_meta)
    # as text, because NaN, which a buffer may begin with, does not equal itself
    own_sums = [float(tensor.double().sum()).hex() for tensor in tensors]

    def compare(sums_of_ranks: list[list[str]]) -> None:
        first = sums_of_ranks[0]
        other = [rank for rank, values in enumerate(sums_of_ranks) if values != first]
        if other:
            raise ConfigError(
                f"the model of rank {other[0]} has other initial weights than that of rank 0. "
                "Construct it within `with Lab(...)`, which seeds torch, in the same order on "
                "every rank"
            )

    runtime.gather_and_decide("weights", own_sums, compare)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as real numbers, [..., 2]; others as they are.

    The imaginary numbers weigh double.
    """
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.resolve_conj()) * torch.tensor(
        [1.0, 2.0], device=tensor.device
    )


def require_same_form(inputs: Tree, strategy: Strategy) -> None:
    """Check that ranks which share a model predict inputs of the same shape and dtype. Collective.

    Otherwise they would send and wait for activations of different shapes. It takes about a
    millisecond.

    Args:
        inputs: this rank's own.
        strategy: after `setup`.

    Raises:
        ConfigError: they differ; on all ranks.
    """
    runtime = strategy.runtime
    if strategy.dp_size == runtime.world_size:
        return
    parts: list[str] = []
    for name, tensor in leaves(inputs):
        dtype = str(tensor.dtype).removeprefix("torch.")
        parts.append(f"{name} {list(tensor.shape)} ({dtype})".lstrip())
    own_form = [strategy.dp_rank, ", ".join(parts)]

    def compare(forms_of_ranks: list[list[Any]]) -> None:
        first: dict[int, int] = {}  # rank of each replica
        for rank, (replica, form) in enumerate(forms_of_ranks):
            other = first.setdefault(replica, rank)
            if forms_of_ranks[other] != forms_of_ranks[rank]:
                _, expected = forms_of_ranks[other]
                raise ConfigError(
                    f"predict: rank {rank} got inputs of {form}, but rank {other}, which shares a "
                    f"model with it, got {expected}. Call it with the same inputs on both"
                )

    runtime.gather_and_decide("inputs", own_form, compare)
