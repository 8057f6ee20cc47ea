"""strategy=ddp"""

import copy

import torch
import torch.distributed as dist
from settings import BUCKET_MB
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def sum_bucket(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Sum gradients over the ranks: the loss is divided by the size of the global batch already."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def distribute(model: nn.Module, inputs: Tensor) -> DistributedDataParallel:
    """Let DDP sum the gradients of a model during its backward passes."""
    state = copy.deepcopy(model.state_dict())
    model = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    model.broadcast_buffers = False  # in every step
    model.register_comm_hook(None, sum_bucket)
    # DDP orders its buckets by the first backward pass, and with many ranks the order of addition
    # follows from it. So the first pass is one of zeros, which changes nothing else.
    model.train()
    model(torch.zeros_like(inputs)).sum().backward()
    model.zero_grad()
    model.module.load_state_dict(state)
    return model
