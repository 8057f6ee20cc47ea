"""What dividing a batch changes in a model, found by a trial and said at the beginning.

A layer may mix the samples of a batch: it subtracts their mean, mixes pairs of them, or balances
experts. Of each part of the batch it computes something else than of all of it. So does a buffer
that is computed from the inputs, such as a queue of features, and a loss that has such a buffer.
None is refused, because BatchNorm is such a layer, and many train with it.

The trial computes two samples a and b. A layer that mixes none has the same output for `a` beside
`b` and beside copies of itself, and a sum or a mean over the samples is linear in them:

    outputs(a, b, b)[0] == outputs(a, a, a)[0]
    mean(a, b, b) == (mean(a, a, a) + 2 mean(b, b, b)) / 3
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage], the only base of all BatchNorms

from ddp_lab.data.trees import Tree, apply, leaves, rows, to
from ddp_lab.models.calls import call
from ddp_lab.models.kept_state import state_kept
from ddp_lab.models.outputs import tensors_of
from ddp_lab.models.trial import count_flops, is_large
from ddp_lab.tasks.base import Task
from ddp_lab.tasks.loss_trial import trial_of_loss
from ddp_lab.tasks.nested import device_of, outputs_for, targets_for
from ddp_lab.training.divided_loss import Division

EXACT = 1e-4  # relative tolerance: the same kernels compute the same row of both batches
ROUNDED = 0.05  # the same of outputs in half precision
# of forward and backward pass of a sample: a forward pass of ResNet-50 takes a second on two cores
MOST_FLOPS = 5e10

Samples = tuple[Tree, Tree]  # inputs and targets of two samples


class Pass(NamedTuple):
    """What a forward pass in training mode has computed.

    Attributes:
        outputs: all tensors of it.
        buffers: of the model, by name, without those of BatchNorm.
    """

    outputs: list[torch.Tensor]
    buffers: dict[str, torch.Tensor]


def describe_division(
    division: Division, model: nn.Module, task: Task, samples: Callable[[], Samples | None]
) -> list[str]:
    """Return lines for the log about what the parts of a batch compute differently.

    BatchNorm is left out, of which the strategies speak. Nothing is said of a large model, which
    would take long, nor of one that fails for the samples.

    Args:
        division: of the batch.
        model: the complete model. Its state, that of the loss and random states are restored.
        task: with the loss.
        samples: returns two samples, which need not differ; None if there are none. It is called if
            the model is tried.
    """
    causes = causes_of(division)
    if not causes or any(parameter.is_meta for parameter in model.parameters()):
        return []
    lines: list[str] = []
    with suppress(Exception):
        inputs, targets = samples() or (None, None)
        if inputs is None or not is_cheap(model, inputs):
            return []
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        pair = to(varied(inputs), device)
        changed = [mixed_samples(model, pair), changed_in_loss(model, task, pair, targets)]
        consequence = (
            f"With {' and '.join(causes)} the losses differ from those of one device; "
            "`ddp-lab verify` shows by how much"
        )
        lines = [f"{text}. {consequence}" for text in changed if text]
    return lines


def causes_of(division: Division) -> list[str]:
    """Return what makes the model compute parts of a batch; empty if nothing does."""
    strategy = division.strategy
    counts = {
        f"strategy={strategy.name} on {strategy.replicas} replicas": strategy.replicas,
        f"accumulate={division.accumulate}": division.accumulate,
        f"strategy.num_microbatches={strategy.num_microbatches}": strategy.num_microbatches,
    }
    return [name for name, count in counts.items() if count > 1]


def is_cheap(model: nn.Module, inputs: Tree) -> bool:
    """Return whether the trial takes a few seconds on a processor at most."""
    if not is_large(model):
        return True
    flops = count_flops(model, rows(inputs, slice(0, 1)))
    return flops is not None and flops <= MOST_FLOPS


def varied(inputs: Tree) -> Tree:
    """Return two samples that differ: where they are equal, the second one is reversed.

    The numbers of a reversed sample, such as tokens, are again numbers that the model knows.
    """

    def reverse_second(tensor: torch.Tensor) -> torch.Tensor:
        first = tensor[:1]
        second = tensor[1:2]
        if torch.equal(first, second):
            second = second.flip([*range(1, tensor.dim())])
        return torch.cat([first, second])

    return apply(reverse_second, inputs)


def mixed_samples(model: nn.Module, pair: Tree) -> str:
    """Return which outputs or buffers of a model depend on several samples; "" if none does.

    Args:
        model: complete.
        pair: two samples, on its device.
    """
    different = any(not torch.equal(tensor[0], tensor[1]) for _, tensor in leaves(pair))
    if not different:
        return ""
    fewer = pass_of(model, pair)
    both, first, second = (
        pass_of(model, apply(lambda tensor, chosen=chosen: tensor[chosen], pair))
        for chosen in ([0, 1, 1], [0, 0, 0], [1, 1, 1])
    )
    outputs = zip(both.outputs, first.outputs, second.outputs, fewer.outputs, strict=True)
    for together, one, other, shorter in outputs:
        dimension = dimension_of_samples(shorter, together)
        if dimension is None:  # a sum or a mean over the samples
            expected = (one + 2 * other) / 3
            actual = together
        else:
            expected = one.select(dimension, 0)
            actual = together.select(dimension, 0)
        if differ(expected, actual):
            return "the outputs of a sample depend on the others of its batch, as with BatchNorm"
    for name, buffer in both.buffers.items():
        if differ(first.buffers[name], buffer):
            return f"the buffer {name} of the model is computed from the batch"
    return ""


def dimension_of_samples(shorter: torch.Tensor, longer: torch.Tensor) -> int | None:
    """Return the dimension in which an output has its samples; None if it has no row for each.

    Args:
        shorter, longer: the same output for different numbers of samples.
    """
    sizes = zip(shorter.shape, longer.shape, strict=True)
    return next((place for place, (few, more) in enumerate(sizes) if few != more), None)


def pass_of(model: nn.Module, inputs: Tree) -> Pass:
    """Return what a forward pass in training mode computes, always from the same state.

    BatchNorm normalises by its running statistics in it.
    """
    with state_kept(model), torch.no_grad():
        torch.manual_seed(0)
        model.train()
        own_buffers = set[str]()
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm):
                module.eval()
                own_buffers |= {f"{name}.{buffer}" for buffer, _ in module.named_buffers()}
        outputs = tensors_of(call(model, inputs))
        buffers = {
            name: buffer.clone()
            for name, buffer in model.named_buffers()
            if name not in own_buffers
        }
        return Pass([tensor.clone() for tensor in outputs], buffers)


def differ(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Return whether tensors differ by more than rounding; False if one is not finite."""
    if expected.shape != actual.shape:
        return True
    is_exact = actual.dtype not in (torch.float16, torch.bfloat16)
    one, other = (tensor.to(torch.complex128) for tensor in (expected, actual))
    if not one.numel() or not bool(one.isfinite().all() and other.isfinite().all()):
        return False
    scale = max(float(one.abs().max()), float(other.abs().max()))
    return float((one - other).abs().max()) > scale * (EXACT if is_exact else ROUNDED)


def changed_in_loss(model: nn.Module, task: Task, pair: Tree, targets: Tree) -> str:
    """Return which buffer of the loss a training step changes; "" if it changes none.

    Args:
        model: complete.
        task: with the loss.
        pair: two samples, on the model's device.
        targets: of two samples.
    """
    if not any(True for _ in task.buffers()):
        return ""
    with state_kept(model), state_kept(task), trial_of_loss():
        outputs = outputs_for(task, call(model.train(), pair))
        copied = copy.deepcopy(task).to(device_of(outputs)).train()
        before = {name: buffer.clone() for name, buffer in copied.named_buffers()}
        with torch.enable_grad():
            copied.loss_sum(outputs, targets_for(task, targets, device_of(outputs)))
        names: Sequence[str] = [
            name for name, buffer in copied.named_buffers() if not torch.equal(buffer, before[name])
        ]
    if not names:
        return ""
    return f"the buffer {names[0]} of the loss changes with each of its calls"
