"""Sum gradients over the ranks while the backward pass still computes.

The backward pass goes from the last layer to the first. The gradient of the last layer is complete
first, and can be summed while the others are still computed, so that communication is hidden behind
computation. DDP does this with buckets; here each gradient has its own all-reduce.

    backward     | layer 3 | layer 2 | layer 1 |
    all-reduce             | layer 3 | layer 2 | layer 1 |   finish() waits only for the last one
"""

import torch
import torch.distributed as dist
from torch import nn


class Overlap:
    """Sums the gradients of a model's parameters over the ranks during its backward passes.

    Args:
        model: after each of its backward passes `finish` is called.
    """

    def __init__(self, model: nn.Module):
        self.works: list[dist.Work] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.start)

    def start(self, parameter: torch.Tensor) -> None:
        """Start to sum a gradient, which is complete, without waiting for the sum."""
        self.works.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self) -> None:
        """Wait until all gradients of this backward pass are summed."""
        for work in self.works:
            work.wait()
        self.works.clear()
