"""FSDP2, fully sharded data parallelism: every rank keeps 1/W of each parameter, of its gradient and of its momentum.

A block's parameters are gathered from all ranks just before it runs and dropped after it, forward and backward; its gradients
are summed and scattered, so that each rank gets the sum of its own part (Rajbhandari et al. 2019, ZeRO stage 3,
arXiv:1910.02054). All ranks work on different data, as under ddp; only what stays in memory is split.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ddp_lab.models.chain import Chain
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm
from ddp_lab.world.runtime import Runtime


class FSDP(Strategy):
    """torch.distributed.fsdp.fully_shard on each block, then on the whole.

    Args:
        reshard_after_forward: whether to free a block's gathered parameters after its forward pass and gather them again for
            its backward pass, which takes less memory and 1.5 times the communication.
        batch_norm: ranks over which BatchNorm computes its statistics in training: each rank by itself (local) or all ranks
            of the data parallelism together (sync).
    """

    sharded = True

    def __init__(self, runtime: Runtime, reshard_after_forward: bool, batch_norm: BatchNorm):
        super().__init__(runtime)
        self.reshard_after_forward, self.batch_norm = reshard_after_forward, batch_norm

    def setup(self, model: Chain) -> None:
        mesh = self.runtime.mesh(self.axes)
        # In the mesh's own group: a communicator keeps an order, which several on one GPU need not.
        self.module = self.forward = set_batch_norm(model.to(self.device), self.batch_norm, mesh.get_group("dp"))
        policy = MixedPrecisionPolicy()
        if self.runtime.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            # BatchNorm's kernels want their parameters in float32 beside the statistics; inputs may be bf16.
            for layer in model.modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    keep = MixedPrecisionPolicy(cast_forward_inputs=False)
                    fully_shard(layer, mesh=mesh, reshard_after_forward=self.reshard_after_forward, mp_policy=keep)
        for part in [*model, model]:
            fully_shard(part, mesh=mesh, reshard_after_forward=self.reshard_after_forward, mp_policy=policy)

    def autocast(self) -> AbstractContextManager:
        return nullcontext()  # fully_shard has a policy of its own

    def divisor(self, count: int) -> float:
        return count / self.dp_size  # fully_shard averages over the ranks

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Whole gradients stay on every rank until the last piece: accumulation costs the memory that sharding saved."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def gradient_norm(self) -> torch.Tensor:
        return super().gradient_norm().full_tensor()
