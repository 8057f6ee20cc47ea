"""A trial of the model before the run: two samples pass forward and backward, which finds the parameters that are not used."""

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ddp_lab.config.errors import ConfigError, SampleError, describe_error
from ddp_lab.models.kept_state import state_kept
from ddp_lab.models.outputs import require_tensor
from ddp_lab.world.runtime import Runtime

DRAWS = 8  # of random inputs, before a parameter counts as unused: a branch may depend on the numbers
LARGE = 10_000_000  # parameters from which a model is tried on the meta device, whose imports take 1.2 s


class LossError(ConfigError):
    """The loss has failed, and not the model; the message says so."""


class Tried(NamedTuple):
    """What a trial has found.

    Attributes:
        unused: names of the trainable parameters that get no gradient.
        notes: about frozen and unused parameters, for the log.
    """

    unused: frozenset[str]
    notes: list[str]


@dataclass(frozen=True)
class Trial:
    """What a model is tried with.

    Attributes:
        inputs: two samples, on the CPU; those of numbers with a fraction are random.
        check: raises an exception if the outputs, on any device, are not those that the task needs.
        of_all: whether ddp_lab's own models are tried, too, which may be made for another task.
        freezes: whether parameters without a gradient are frozen; False if other steps may use them.
    """

    inputs: torch.Tensor
    check: Callable[[torch.Tensor], object]
    of_all: bool = False
    freezes: bool = True


def random_like(inputs: torch.Tensor, draw: int = 0) -> torch.Tensor:
    """Return random numbers in place of inputs that have a fraction, else the inputs.

    Args:
        inputs: of any shape.
        draw: number of the draw: 0 has numbers from 0 to 1, others are normally distributed.
    """
    if not inputs.is_floating_point():
        return inputs
    generator = torch.Generator().manual_seed(draw)
    make = torch.randn if draw else torch.rand
    return make(inputs.shape, generator=generator, dtype=inputs.dtype)


def freeze_unused(model: nn.Module, trial: Trial, runtime: Runtime, key: str) -> Tried:
    """Find the parameters that a step does not use, and freeze them if the trial says so.

    No gradient reaches an unused parameter, so one device leaves it as it is. Some strategies would
    wait for its gradient.
    A frozen parameter (requires_grad=False) has no gradient under any strategy.

    Args:
        model: the complete model. Its state, that of the loss in the trial and random states are
            restored.
        trial: what it is tried with.
        key: key and value of the config that the messages are about.

    Raises:
        ConfigError: the model cannot process these inputs, its outputs are not those of the task, or it has nothing to train.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = [name for name, _ in model.named_parameters() if name not in trained]
    unused = find_unused(model, trial, runtime, key) if trained else []
    for draw in range(1, DRAWS):
        if not 0 < len(unused) < len(trained) or not trial.inputs.is_floating_point():
            break
        other = replace(trial, inputs=random_like(trial.inputs, draw))
        with suppress(ConfigError):  # a model may refuse numbers below 0
            also_unused = find_unused(model, other, runtime, key)
            unused = [name for name in unused if name in also_unused]
    if len(unused) == len(trained):
        raise ConfigError(
            f"{key}: has nothing to train: {'its logits depend on no parameter' if trained else 'all parameters are frozen'}. "
            "Leave requires_grad=True for some of the parameters that `forward` uses, for example for the head"
        )
    for name in unused if trial.freezes else ():
        model.get_parameter(name).requires_grad = False
    what = "not used in training, so they stay as they are" if trial.freezes else "not used by two samples"
    notes = {"frozen": frozen, what: unused}
    found = {what: names for what, names in notes.items() if names}
    lines = [f"{len(names)} parameters are {what}: {some(names)}" for what, names in found.items()]
    return Tried(frozenset(unused), lines)


def find_unused(model: nn.Module, trial: Trial, runtime: Runtime, key: str) -> list[str]:
    """Return the names of the trainable parameters that get no gradient in a training step. The arguments are as above."""
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if not on_meta and sum(parameter.numel() for parameter in model.parameters()) > LARGE:
        # A model that reads values cannot run on the meta device, which computes shapes only.
        with suppress(Exception), state_kept(model, trial.check, weights=False):
            return without_gradient(meta_copy(model), trial, "meta")
    device = runtime.device
    try:
        if on_meta:
            with state_kept(model, trial.check):
                return without_gradient(meta_copy(model), trial, "meta")
        cuda = [device] if device.type == "cuda" else []
        with state_kept(model, trial.check), torch.random.fork_rng(cuda), runtime.autocast():
            return without_gradient(model.to(device), trial, device)
    except LossError:
        raise
    except (ConfigError, SampleError) as error:
        raise ConfigError(f"{key}: {error}") from None
    except Exception as error:
        other = (
            "" if runtime.precision == "float32" else "precision=float32, if a layer does not support bf16 on this device, or "
        )
        small = " (a common cause is that they are too small)" if trial.inputs.dim() == 4 else ""
        raise ConfigError(
            f"{key}: failed for {describe(trial.inputs)}: {describe_error(error)}. Use "
            f"{other}inputs that the model supports{small}, or correct the model"
        ) from None


def describe(inputs: torch.Tensor) -> str:
    """Return the shape of a sample, for a message."""
    shape = "x".join(map(str, inputs.shape[1:]))
    return f"images of {shape} (channels, height, width)" if inputs.dim() == 4 else f"inputs of shape {list(inputs.shape[1:])}"


def without_gradient(model: nn.Module, trial: Trial, device: torch.device | str) -> list[str]:
    """Run a forward and backward pass; return the names of the trainable parameters that then have no gradient.

    A forward pass in evaluation mode follows, because a mistake there would otherwise be found after the first epoch.
    """
    inputs = trial.inputs.to(device)
    outputs = model.train()(inputs)
    require_batch(require_tensor(outputs, "it"), len(inputs), "")
    trial.check(outputs)
    if outputs.requires_grad:
        outputs.float().sum().backward()
    with torch.no_grad():
        outputs = model.eval()(inputs)
        require_batch(require_tensor(outputs, "in evaluation mode it"), len(inputs), "in evaluation mode ")
        trial.check(outputs)
    model.train()
    return [name for name, tensor in model.named_parameters() if tensor.requires_grad and tensor.grad is None]


def count_flops(model: nn.Module, inputs: torch.Tensor) -> float | None:
    """Return the FLOPs of forward and backward pass for a sample, by torch's formulas; None if the meta device cannot run it.

    Args:
        model: the complete model, which stays as it is.
        inputs: some samples.
    """
    with suppress(Exception), FlopCounterMode(display=False) as counter:
        meta_copy(model).train()(inputs.to("meta")).float().sum().backward()
        return counter.get_total_flops() / len(inputs)
    return None


def require_batch(outputs: torch.Tensor, size: int, when: str) -> None:
    """Raise a TypeError unless a model has returned outputs of all samples, [size, ...]."""
    if outputs.shape[:1] != (size,):
        found = list(outputs.shape)
        raise TypeError(f"{when}it must return a tensor [{size}, ...] for {size} samples, got {found}")


def check_logits(logits: torch.Tensor, classes: int) -> None:
    """Raise a TypeError unless a model has returned logits of shape [b, classes]."""
    if logits.dim() != 2 or logits.size(1) != classes:
        expected = [len(logits), classes]
        raise TypeError(f"it must return logits of shape {expected} (batch, classes), got {list(logits.shape)}")


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device. No memory is allocated for its parameters and buffers."""
    memo: dict[int, torch.Tensor] = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in model.buffers()}
    for tensor in model.parameters():
        memo[id(tensor)] = nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad)
    return copy.deepcopy(model, memo)


def some(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
