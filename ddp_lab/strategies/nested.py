"""Batches whose inputs or outputs are a tuple, a dict, or an object of tensors."""

from typing import TYPE_CHECKING, Any

import torch

from ddp_lab.data.trees import Tree, size
from ddp_lab.models.outputs import require_samples, without_padding

if TYPE_CHECKING:
    from ddp_lab.strategies.base import Strategy


def samples_in(strategy: "Strategy", inputs: Tree) -> int:
    """Return the number of samples of inputs.

    Raises:
        ConfigError: the strategy does not support inputs of this type.
    """
    strategy.require_inputs(inputs)
    return size(inputs)


def outputs_of_samples(strategy: "Strategy", outputs: Any, inputs: Tree, num_valid: int) -> Any:
    """Return the outputs of a batch, without padding if they are no tensor.

    The loss could cut it only from a tensor.

    Args:
        strategy: which may not support such inputs.
        outputs: of the model.
        inputs: with padding at the end.
        num_valid: number of samples without padding.

    Raises:
        ConfigError: they are a tensor of other samples, or their padding cannot be cut.
    """
    samples = samples_in(strategy, inputs)
    if isinstance(outputs, torch.Tensor):
        require_samples(outputs.shape, samples)
        return outputs
    return without_padding(outputs, samples, num_valid)
