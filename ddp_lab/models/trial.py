"""A trial of the model before the run: two images pass forward and backward, which finds the parameters that are not used."""

import copy
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.world.runtime import Runtime

LARGE = 10_000_000  # parameters from which a model is tried on the meta device, whose imports take 1.2 s


def freeze_unused(model: nn.Module, shape: tuple[int, int, int], num_classes: int, runtime: Runtime, key: str) -> list[str]:
    """Freeze the parameters that training never uses, and return notes about the frozen parameters for the log.

    No gradient reaches an unused parameter, so one device leaves it as it is. Data parallelism would wait for its gradient.
    A frozen parameter (requires_grad=False) has no gradient under any strategy.

    Args:
        model: the complete model, on the CPU. Its buffers and torch's random state are restored.
        shape: a sample's (channels, height, width).
        num_classes: expected number of logits.
        key: key and value of the config that the messages are about.

    Raises:
        ConfigError: the model cannot process these images, does not return logits, or has nothing to train.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = [name for name, _ in model.named_parameters() if name not in trained]
    unused = find_unused(model, shape, num_classes, runtime, key) if trained else []
    if len(unused) == len(trained):
        raise ConfigError(
            f"{key}: has nothing to train: {'its logits depend on no parameter' if trained else 'all parameters are frozen'}. "
            "Leave requires_grad=True for some of the parameters that `forward` uses, for example for the head"
        )
    for name in unused:
        model.get_parameter(name).requires_grad = False
    notes = {"frozen": frozen, "not used in training, so they stay as they are": unused}
    return [f"{len(names)} parameters are {what}: {some(names)}" for what, names in notes.items() if names]


def find_unused(model: nn.Module, shape: tuple[int, int, int], num_classes: int, runtime: Runtime, key: str) -> list[str]:
    """Return the names of the trainable parameters that get no gradient in a training step. The arguments are as above."""
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if not on_meta and sum(parameter.numel() for parameter in model.parameters()) > LARGE:
        with suppress(Exception):  # a model that reads values cannot run on the meta device, which computes shapes only
            return without_gradient(meta_copy(model), torch.empty(2, *shape, device="meta"), num_classes)
    device, buffers = runtime.device, [buffer.clone() for buffer in model.buffers()]
    try:
        if on_meta:
            return without_gradient(meta_copy(model), torch.empty(2, *shape, device="meta"), num_classes)
        with torch.random.fork_rng([device] if device.type == "cuda" else []), runtime.autocast():
            return without_gradient(model.to(device), torch.rand(2, *shape, device=device), num_classes)
    except Exception as error:
        other = (
            "" if runtime.precision == "float32" else "precision=float32, if a layer does not support bf16 on this device, or "
        )
        raise ConfigError(
            f"{key}: failed for images of {'x'.join(map(str, shape))} (channels, height, width): {describe_error(error)}. Use "
            f"{other}images that the model supports (a common cause is that they are too small), or correct the model"
        ) from None
    finally:
        model.to("meta" if on_meta else "cpu").zero_grad()
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)


def without_gradient(model: nn.Module, images: torch.Tensor, num_classes: int) -> list[str]:
    """Run a forward and backward pass; return the names of the trainable parameters that then have no gradient.

    A forward pass in evaluation mode follows, because a mistake there would otherwise be found after the first epoch.
    """
    logits = model.train()(images)
    check_logits(logits, len(images), num_classes)
    if logits.requires_grad:
        logits.float().sum().backward()
    with torch.no_grad():
        check_logits(model.eval()(images), len(images), num_classes, "in evaluation mode ")
    model.train()
    return [name for name, tensor in model.named_parameters() if tensor.requires_grad and tensor.grad is None]


def check_logits(logits: object, size: int, num_classes: int, when: str = "") -> None:
    """Raise a TypeError unless a model has returned logits of shape [size, num_classes]."""
    if not isinstance(logits, torch.Tensor) or logits.shape != (size, num_classes):
        found = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise TypeError(f"{when}it must return logits of shape [{size}, {num_classes}] (batch, classes), got {found}")


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device. No memory is allocated for its parameters and buffers."""
    memo: dict[int, torch.Tensor] = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in model.buffers()}
    for tensor in model.parameters():
        memo[id(tensor)] = nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad)
    return copy.deepcopy(model, memo)


def some(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
