"""What of two recordings is compared, in the order in which a training computes it."""

from collections.abc import Iterator
from typing import NamedTuple

from ddp_lab.proof.recording import Recording, Tensors

LOSS = "the loss"


class Quantity(NamedTuple):
    """Tensors of a recording that are compared, in the order in which a step computes them.

    Attributes:
        kind: initial, gradient, clipped, loss or weight.
        step: number of the step, from 1; 0: before the first one.
        tensors: by name.
    """

    kind: str
    step: int
    tensors: Tensors


def quantities(recording: Recording) -> Iterator[Quantity]:
    """Yield what is compared, in the order in which a training computes it."""
    yield Quantity("initial", 0, recording.initial)
    for place, gradients in enumerate(recording.gradients):
        step = place + 1
        yield Quantity("gradient", step, gradients)
        yield Quantity("loss", step, {LOSS: recording.losses[place]})
        if recording.clipped:
            yield Quantity("clipped", step, recording.clipped[place])
    yield Quantity("weight", len(recording.sizes), recording.weights)
