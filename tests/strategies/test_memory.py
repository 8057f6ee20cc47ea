"""The memory that strategies need for gradients and training state, and the data types of what they keep."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from training import make_model

from ddp_lab.strategies.ddp import DDP
from ddp_lab.world.runtime import Runtime


def spans_of(view: bool) -> tuple[list[range], list[range]]:
    """Return the addresses of ddp's buckets and of the gradients, after the second of two steps."""
    buckets: list[range] = []

    def noting(group, bucket):
        buckets.append(addresses(bucket.buffer()))
        return allreduce_hook(group, bucket)

    with Runtime("cpu") as runtime:
        runtime.open_group()
        strategy = DDP(runtime, "local", 0.1, view, False, "none")
        strategy.setup(make_model("lenet", 0))
        strategy.wrapper.register_comm_hook(None, noting)
        optimizer = torch.optim.SGD(strategy.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            buckets.clear()
            strategy.forward_backward(torch.randn(4, 1, 28, 28), torch.arange(4), 4)
        gradients = [addresses(parameter.grad) for parameter in strategy.parameters()]
        del strategy, optimizer
    return buckets, gradients


def addresses(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


@pytest.mark.parametrize("view", [True, False])
def test_gradients_of_ddp_take_no_memory_besides_the_buckets_if_they_are_views(view):
    buckets, gradients = spans_of(view)
    assert len(buckets) > 1
    assert sum(map(len, gradients)) == sum(map(len, buckets)) == 4 * 129_068
    inside = [
        any(bucket.start <= gradient.start < gradient.stop <= bucket.stop for bucket in buckets) for gradient in gradients
    ]
    assert inside == [view] * len(gradients)
