"""The exact bytes of parameters, gradients, optimizer state and averages that a rank holds, from shapes alone."""

from dataclasses import dataclass, replace

from torch import nn

from ddp_lab.estimate.optimizer_state import MakeOptimizer, state_of
from ddp_lab.strategies.share import Share


@dataclass(frozen=True)
class Footprint:
    """What one rank holds of the model, in bytes; the gradients are those after the backward pass.

    Attributes:
        parameters, gradients, optimizer: of its part of the model.
        averages: of the weights, with the key `ema`.
        buffers: such as BatchNorm's statistics, which are never sharded.
    """

    parameters: int
    gradients: int
    optimizer: int
    averages: int
    buffers: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.parameters + self.gradients + self.optimizer + self.averages + self.buffers


def footprint(share: Share, model: nn.Module, make_optimizer: MakeOptimizer, ema: bool) -> Footprint:
    """Return what a rank holds.

    Args:
        share: the rank's part of the model.
        model: the complete model, which may be on the meta device.
        make_optimizer: constructs the optimizer of a list of parameters.
        ema: whether the weights are averaged.
    """
    held = [(share.nbytes(name, tensor), tensor) for name, tensor in model.named_parameters() if share.has(name)]
    trained = [size for size, tensor in held if tensor.requires_grad]
    buffers = sum(tensor.nbytes for name, tensor in model.named_buffers() if share.has(name))
    copies, others = state_of(make_optimizer)
    return Footprint(
        parameters=sum(size for size, _ in held),
        gradients=sum(trained),
        optimizer=copies * sum(trained) + others * len(trained),
        averages=sum(trained) + buffers if ema else 0,
        buffers=buffers,
    )


def on_device(held: Footprint, share: Share) -> Footprint:
    """Return the part of what a rank holds that is not in host memory."""
    return replace(held, parameters=0, gradients=0, optimizer=0, averages=0) if share.offload else held
