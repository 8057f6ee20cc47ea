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
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage], the only base of all BatchNorms

from ddp_lab.config.errors import count
from ddp_lab.data.trees import Tree, apply, leaves, rows, to
from ddp_lab.models.calls import call
from ddp_lab.models.kept_state import random_state_kept, state_kept
from ddp_lab.models.outputs import map_outputs, tensors_of
from ddp_lab.models.trial import count_flops, is_large
from ddp_lab.strategies.batch_norm import has_batch_norm
from ddp_lab.tasks.base import Task
from ddp_lab.tasks.loss_trial import trial_of_loss
from ddp_lab.tasks.nested import device_of, outputs_for, targets_for
from ddp_lab.training.divided_loss import Division

EXACT = 1e-4  # relative tolerance: the same kernels compute the same row of both batches
ROUNDED = 0.05  # the same of outputs in half precision
# What is tried takes a few seconds on a processor at most, and a copy of the weights.
MOST_FLOPS = 3e10  # of forward and backward pass of a sample; ResNet-50 has 2.5e10
MOST_BYTES = 2**30  # of the weights
# elements of a sample up to which the FLOPs of a small model are few, and not counted
SMALL = 2**16
LONGEST = 2.0  # seconds of the first forward pass, after which no other one is made

MIXED = "the outputs of a sample depend on the others of its batch, as with BatchNorm"
NO_SUM = "an output that has no row for each sample is neither a sum nor a mean over the samples"

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

    BatchNorm is left out, of which `describe_batch_norm` speaks. Nothing is said of a large model,
    which would take long, nor of one that fails for the samples.

    Args:
        division: of the batch.
        model: the complete model. Its state, that of the loss and random states are restored.
        task: with the loss.
        samples: returns two samples, which need not differ; None if there are none. It is called if
            the model is tried.
    """
    causes = division.causes_for_model
    if not causes or any(parameter.is_meta for parameter in model.parameters()):
        return []
    changed: list[str] = []
    with suppress(Exception), random_state_kept():
        inputs, targets = samples() or (None, None)
        if inputs is None or not is_cheap(model, inputs):
            return []
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        pair = to(varied(inputs, reverses=device.type == "cpu"), device)
        if all(torch.equal(tensor[0], tensor[1]) for _, tensor in leaves(pair)):
            return []
        counts = division.accumulate > 1 or division.strategy.num_microbatches > 1
        with suppress(Exception):
            changed.append(mixed_samples(model, pair))
        with suppress(Exception):
            changed.append(changed_in_loss(model, task, pair, targets, counts))
    consequence = (
        f"With {' and '.join(causes)} the losses differ from those of one device; "
        "`ddp-lab verify` shows by how much"
    )
    return [f"{text}. {consequence}" for text in changed if text]


def describe_batch_norm(division: Division, model: nn.Module) -> list[str]:
    """Return a line for the log about BatchNorm in parts of a batch; none if there is none.

    Args:
        division: of the batch.
        model: the complete model.
    """
    causes = division.causes_for_batch_norm
    if not causes or not has_batch_norm(model):
        return []
    return [
        f"BatchNorm normalises at most {count(division.samples_for_batch_norm, 'sample')} of a "
        f"global batch of {division.batch_size} together, because of {' and '.join(causes)}: "
        "losses differ from those of one device, most with few samples. strategy=ddp with "
        "strategy.batch_norm=sync and accumulate=1 normalises the global batch"
    ]


def is_cheap(model: nn.Module, inputs: Tree) -> bool:
    """Return whether the weights are few enough to be copied, and the FLOPs if they are known.

    Counting them takes as long as some passes of a small model.
    """
    if sum(parameter.nbytes for parameter in model.parameters()) > MOST_BYTES:
        return False
    sample = rows(inputs, slice(0, 1))
    elements = sum(tensor.numel() for _, tensor in leaves(sample))
    if not is_large(model) and elements <= SMALL:
        return True
    flops = count_flops(model, sample)
    return flops is None or flops <= MOST_FLOPS


def varied(inputs: Tree, reverses: bool) -> Tree:
    """Return two samples that differ: where they are equal, the second one may be reversed.

    Most numbers of a reversed sample, such as tokens, are numbers that the model knows. An index
    that it does not know ends the trial on a CPU, but would be the end of a GPU's context.
    """

    def reverse_second(tensor: torch.Tensor) -> torch.Tensor:
        first = tensor[:1]
        second = tensor[1:2]
        if reverses and torch.equal(first, second):
            second = second.flip([*range(1, tensor.dim())])
        return torch.cat([first, second])

    return apply(reverse_second, inputs)


def mixed_samples(model: nn.Module, pair: Tree) -> str:
    """Return which outputs or buffers of a model depend on several samples; "" if none does.

    Args:
        model: complete.
        pair: two samples, on its device.
    """
    begin = time.monotonic()
    fewer = pass_of(model, pair)
    if time.monotonic() - begin > LONGEST:
        return ""
    both, first, second = (
        pass_of(model, apply(lambda tensor, chosen=chosen: tensor[chosen], pair))
        for chosen in ([0, 1, 1], [0, 0, 0], [1, 1, 1])
    )
    again = pass_of(model, apply(lambda tensor: tensor[[0, 1, 1]], pair), other_numbers=True)
    outputs = zip(
        both.outputs, first.outputs, second.outputs, fewer.outputs, again.outputs, strict=True
    )
    for together, one, other, shorter, redrawn in outputs:
        dimension = dimension_of_samples(shorter, together)
        if dimension is not None:
            if differ(one.select(dimension, 0), together.select(dimension, 0)):
                return MIXED
        # each sample of a sum or a mean has random numbers of its own, which depend on its place
        elif not differ(together, redrawn) and differ((one + 2 * other) / 3, together):
            return NO_SUM
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


def pass_of(model: nn.Module, inputs: Tree, other_numbers: bool = False) -> Pass:
    """Return what a forward pass in training mode computes, always from the same state.

    BatchNorm normalises by its running statistics in it.

    Args:
        model: complete.
        inputs: some samples.
        other_numbers: whether it draws other random numbers than without this argument.
    """
    with state_kept(model), torch.no_grad():
        if other_numbers:
            for device in {torch.device("cpu"), *(tensor.device for _, tensor in leaves(inputs))}:
                torch.rand(1, device=device)
        model.train()
        of_norms = set[str]()
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm):
                module.eval()
                of_norms |= {buffer for buffer, _ in module.named_buffers(prefix=name)}
        outputs = tensors_of(call(model, inputs))
        buffers = {
            name: buffer.clone() for name, buffer in model.named_buffers() if name not in of_norms
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


def changed_in_loss(
    model: nn.Module, task: Task, pair: Tree, targets: Tree, counts_calls: bool
) -> str:
    """Return which buffer of the loss the parts of a batch change differently; "" if none.

    Args:
        model: complete.
        task: with the loss.
        pair: two samples, on the model's device.
        targets: of two samples.
        counts_calls: whether a step calls the loss several times, which a counter would count.
    """
    if not any(True for _ in task.buffers()):
        return ""
    with state_kept(model), state_kept(task), trial_of_loss():
        outputs = outputs_for(task, call(model.train(), pair))
        device = device_of(outputs)
        before = dict(copy.deepcopy(task).to(device).named_buffers())
        after: list[dict[str, torch.Tensor]] = []
        for chosen in ([0, 1], [0, 0]):
            copied = copy.deepcopy(task).to(device).train()
            some_outputs = map_outputs(lambda tensor, chosen=chosen: tensor[chosen], outputs)
            some_targets = apply(lambda tensor, chosen=chosen: tensor[chosen], targets)
            with torch.enable_grad():
                copied.loss_sum(some_outputs, targets_for(task, some_targets, device))
            after.append(dict(copied.named_buffers()))
    for name, buffer in after[0].items():
        if differ(after[1][name], buffer):
            return f"the buffer {name} of the loss is computed from the batch"
        if counts_calls and (name not in before or differ(before[name], buffer)):
            return f"the buffer {name} of the loss changes with each of its calls"
    return ""
