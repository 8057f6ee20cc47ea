"""What an optimizer keeps for every parameter."""

from collections.abc import Callable

import torch
from torch import nn

from ddp_lab.config.build import for_cpu

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def state_of(make_optimizer: MakeOptimizer) -> tuple[int, int]:
    """Return the number of tensors of the parameter's shape, and the bytes of all other tensors, such as a step counter.

    They are found by a step with a parameter of two elements.

    Args:
        make_optimizer: constructs the optimizer of a list of parameters.
    """
    probe = nn.Parameter(torch.zeros(2))
    probe.grad = torch.zeros(2)
    optimizer = for_cpu(make_optimizer([probe]))
    optimizer.step()
    tensors = [value for value in optimizer.state[probe].values() if isinstance(value, torch.Tensor)]
    copies = [tensor for tensor in tensors if tensor.shape == probe.shape]
    return len(copies), sum(tensor.nbytes for tensor in tensors) - sum(tensor.nbytes for tensor in copies)
