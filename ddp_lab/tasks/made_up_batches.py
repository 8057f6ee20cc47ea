"""The outputs and targets that a loss is tried on: made up, because the data have too few kinds.

Outputs of a model whose last layer is zero are all alike, and the first samples of a sorted dataset
are of one class: a loss over the batch may then look like a sum over samples.
"""

from collections.abc import Callable, Generator
from functools import partial
from itertools import chain
from typing import Any

import torch

from ddp_lab.data.trees import Tree, apply
from ddp_lab.models.outputs import map_outputs, tensors_of

SAMPLES = 8  # of a trial: triplets need three, of which two are alike
# at most, of the trial of a larger batch: of 8 samples none is 3 standard deviations away from the
# mean
MANY = 32
OUTLIER = 100.0  # factor of the outputs of one of them
ELEMENTS = 2**23  # of the outputs of a trial; a single sample may have more


def made_up_batches(outputs: Any, targets: Tree, batch_size: int) -> Generator[tuple[Any, Tree]]:
    """Yield the outputs and targets of made-up batches. None of them has a gradient.

    Args:
        outputs: of the model for one or more samples, [m, ...], in host memory; on the meta device
            if only their shape is known.
        targets: of one or more samples, [n, ...], in host memory.
        batch_size: samples of the GLOBAL batch.
    """
    if isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor):
        yield from chain(
            make_cases(outputs, targets), make_large_cases(outputs, targets, batch_size)
        )
    else:
        yield from make_nested_cases(outputs, targets)


def make_cases(
    outputs: torch.Tensor, targets: torch.Tensor
) -> Generator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random outputs, [count, ...] in float64, and different targets, [count, ...]."""
    size = max(1, outputs[0].numel())
    count = max(2, min(SAMPLES, ELEMENTS // size))
    generator = torch.Generator().manual_seed(0)
    shape = (count, *outputs.shape[1:])
    of_outputs = [torch.randn(shape, generator=generator, dtype=torch.float64)]
    rows = torch.arange(count)
    repeated = targets[rows % len(targets)]
    of_targets = [
        repeated,
        *(make_up(repeated, generator) for make_up in ways_to_make_up(repeated)),
    ]
    if count * size <= ELEMENTS:
        # probabilities
        of_outputs.append(torch.rand(shape, generator=generator, dtype=torch.float64))
        of_targets.append(targets[rows * 0])
        if not outputs.is_meta:
            of_outputs.append(between(outputs, count, generator))

    for each_outputs in of_outputs:
        for each_targets in of_targets:
            yield each_outputs, each_targets


def make_nested_cases(outputs: Any, targets: Tree) -> Generator[tuple[Any, Tree]]:
    """Yield cases as `make_cases`, of outputs or targets that are a tuple, a dict or an object.

    There is none if a tensor has no row for each sample, and so cannot be computed for each alone.
    """
    parts = tensors_of(outputs)
    if not parts or any(part.shape[:1] != parts[0].shape[:1] for part in parts):
        return
    generator = torch.Generator().manual_seed(0)
    numbers = torch.arange(SAMPLES)

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[numbers % len(tensor)]

    def drawn(draw: Callable[..., torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return repeated(tensor)
        return draw((SAMPLES, *tensor.shape[1:]), generator=generator, dtype=torch.float64)

    def mixed(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return repeated(tensor)
        return between(tensor, SAMPLES, generator)

    of_samples = apply(repeated, targets)
    of_targets = [
        of_samples,
        *(
            apply(partial(make_up, generator=generator), of_samples)
            for make_up in (mixed_targets, opposite_targets, spread_targets)
        ),
    ]
    of_outputs = [map_outputs(partial(drawn, draw), outputs) for draw in (torch.randn, torch.rand)]
    if not any(part.is_meta for part in parts):
        of_outputs.append(map_outputs(mixed, outputs))

    for each_outputs in of_outputs:
        for each_targets in of_targets:
            yield each_outputs, each_targets


def make_large_cases(
    outputs: torch.Tensor, targets: torch.Tensor, batch_size: int
) -> Generator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield cases as `make_cases`, of as many samples as a global batch has, but MANY at most.

    A loss may compare the samples of larger batches only, or leave out a sample that is far from
    all others, of which small batches have none.

    Args:
        outputs, targets: as of `make_cases`.
        batch_size: samples of the GLOBAL batch.
    """
    size = max(1, outputs[0].numel())
    count = min(MANY, batch_size, ELEMENTS // size)
    if count <= SAMPLES:
        return

    generator = torch.Generator().manual_seed(2)
    shape = (count, *outputs.shape[1:])
    mixed = mixed_targets(targets[torch.arange(count) % len(targets)], generator)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    with_outlier = normal.clone()
    with_outlier[count // 2] *= OUTLIER
    yield normal, mixed
    yield with_outlier, mixed

    if outputs.is_meta:
        yield torch.rand(shape, generator=generator, dtype=torch.float64), mixed
    else:
        yield between(outputs, count, generator), mixed


def between(outputs: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return outputs, [count, ...], between those of the model, with values that the loss needs."""
    shares = torch.rand(count, len(outputs), generator=generator, dtype=torch.float64)
    shares /= shares.sum(1, keepdim=True)
    return torch.tensordot(shares, outputs.double(), dims=1)


def mixed_targets(targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return targets like these that differ from sample to sample, where some samples are alike."""
    if targets.is_complex():
        return targets * (0.5 + torch.rand(targets.shape, generator=generator, dtype=torch.float64))
    if targets.is_floating_point():
        scaled = targets * (
            0.5 + torch.rand(targets.shape, generator=generator, dtype=targets.dtype)
        )
        binary = ((targets == 0) | (targets == 1)).all(0)
        drawn = torch.randint(0, 2, targets.shape, generator=generator).to(targets.dtype)
        return torch.where(binary, drawn, scaled)

    values = targets.unique()
    if len(values) == 1:
        values = torch.stack(
            [values[0], torch.zeros_like(values[0]) if values[0] else torch.ones_like(values[0])]
        )
    if targets.dim() == 1:  # classes: two samples of each
        return values[torch.arange(len(targets)) // 2 % len(values)]
    return values[torch.randint(0, len(values), targets.shape, generator=generator)]


def opposite_targets(targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return these targets, every other pair of samples with the opposite sign, as of labels 1, -1.

    A loss may compare samples with a positive target with the others.
    """
    if not has_fraction(targets):
        return mixed_targets(targets, generator)
    opposite = torch.arange(len(targets)) // 2 % 2 == 1
    return torch.where(opposite.view(-1, *[1] * (targets.dim() - 1)), -targets, targets)


def spread_targets(targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return targets that are spread around these, more widely from sample to sample.

    Integers stay integers. A loss may compare samples with a target above a threshold with the
    others. Some class indices are too large: a loss that fails for these is not refused.
    """
    if not has_spread(targets):
        return mixed_targets(targets, generator)
    noise = torch.randn(targets.shape, generator=generator, dtype=torch.float64)
    scales = 2.0 ** (1 + torch.arange(len(targets)) % SAMPLES)
    noise *= scales.view(-1, *[1] * (targets.dim() - 1))
    if targets.is_complex():
        return targets * noise
    numbers = targets.double()
    spread = numbers + (1 + numbers.abs()) * noise
    if not targets.is_floating_point():
        # a negative one stands for a sample that does not count
        return torch.where(targets < 0, numbers, spread.abs().round()).to(targets.dtype)
    are_integers = ((numbers == numbers.round()) | numbers.isnan()).all()
    return (spread.round() if are_integers else spread).to(targets.dtype)


def has_fraction(targets: torch.Tensor) -> bool:
    """Return whether targets are real or complex numbers, and no indices."""
    return targets.is_floating_point() or targets.is_complex()


def has_spread(targets: torch.Tensor) -> bool:
    """Return whether targets may be spread.

    Of masks, F.one_hot with large indices would take much memory.
    """
    return has_fraction(targets) or (targets.dtype != torch.bool and targets.dim() == 1)


def ways_to_make_up(
    targets: torch.Tensor,
) -> list[Callable[[torch.Tensor, torch.Generator], torch.Tensor]]:
    """Return the functions that make up different targets of these."""
    ways = [mixed_targets]
    if has_fraction(targets):
        ways.append(opposite_targets)
    if has_spread(targets):
        ways.append(spread_targets)
    return ways
