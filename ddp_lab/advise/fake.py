"""What stands in for parts of a run whose steps are only planned, on fake tensors (plan.py)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lab.models.chain import tie, tied_parameters
from ddp_lab.models.initial_weights import Weights
from ddp_lab.strategies.buckets import Bucket, MiB, fill_buckets


class FakeWeights(Weights):
    """Fake tensors in place of initial weights.

    Args:
        fake: The mode in which tensors have shapes and no memory.
    """

    def __init__(self, fake: AbstractContextManager[object]):
        self.fake = fake

    def fill(
        self,
        blocks: nn.Module,
        device: torch.device,
        put: Callable[[Any, torch.Tensor], None],
    ) -> None:
        """Allocate a module that is on the meta device. Tied parameters stay tied.

        Args:
            blocks: The module.
            device: Where it would be.
            put: It is not called, because there is nothing to copy.
        """
        tied = tied_parameters(blocks)
        with self.fake:
            blocks.to_empty(device=device)
        tie(blocks, tied)


class FakeDDP(DistributedDataParallel):
    """What DDP allocates and sends. DDP's reducer itself reads and writes by pointers.

    Args:
        module: The model, of fake tensors.
        bucket_cap_mb: MiB of gradients that fill a bucket.
        options: Other arguments of DDP, which change neither.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float, **options: Any):
        nn.Module.__init__(self)
        self.module = module
        self.process_group = None
        self.require_backward_grad_sync = True
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for bucket in map(Bucket, fill_buckets(trained, bucket_cap_mb * MiB)):
            sizes = [parameter.numel() for parameter in bucket.parameters]
            flat = bucket.parameters[0].detach().new_empty(sum(sizes))
            for parameter, view in zip(bucket.parameters, flat.split(sizes), strict=True):
                arrive = partial(self._arrive, bucket, flat, view)
                parameter.register_post_accumulate_grad_hook(arrive)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Do nothing: every hook sends the bucket once."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def _arrive(
        self,
        bucket: Bucket,
        flat: torch.Tensor,
        view: torch.Tensor,
        parameter: nn.Parameter,
    ) -> None:
        if not self.require_backward_grad_sync:
            return
        parameter.grad = view.view_as(parameter)
        bucket.missing -= 1
        if bucket.missing == 0:
            bucket.missing = len(bucket.parameters)
            dist.all_reduce(flat)
