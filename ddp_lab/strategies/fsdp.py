"""FSDP2, fully sharded data parallelism: each of W ranks keeps 1/W of every parameter, gradient and momentum tensor.

    rank 0:  shard 0 --+                                                     +-- shard 0 of the summed gradients
                       +-- all_gather -> block -> free ... reduce_scatter <--+
    rank 1:  shard 1 --+                                                     +-- shard 1 of the summed gradients

A block's parameters are gathered from all ranks just before its forward and its backward pass, and freed after each. Its
gradients are summed and scattered, so that each rank gets the sum of its own shard (Rajbhandari et al. 2019, ZeRO stage 3,
arXiv:1910.02054). As under ddp, every rank computes its own local batch; only the memory is sharded.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_lab.config.errors import ConfigError, listed
from ddp_lab.config.types import ClassName
from ddp_lab.models.chain import Chain
from ddp_lab.strategies.activation_checkpointing import Checkpointing, checkpointed, require_no_batch_norm
from ddp_lab.strategies.all_reduce import gradients_of
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm
from ddp_lab.strategies.fully_shard import (
    HOST,
    forget_order,
    log_offload,
    refused,
    require_shardable,
    shard,
    tied_over,
    units,
    without_sync,
)
from ddp_lab.strategies.sharding import fill, local
from ddp_lab.world.runtime import Runtime


class FSDP(Strategy):
    """Data parallelism by torch.distributed.fsdp.fully_shard, applied to each block and then to the complete model.

    Args:
        reshard_after_forward: whether to free a block's gathered parameters after its forward pass and gather them again for
            its backward pass, which takes less memory and 1.5 times the communication.
        batch_norm: ranks over which BatchNorm computes its statistics in training: each rank separately (local), or all
            ranks that read different local batches together (sync).
        wrap: names of the classes of modules that are gathered as a unit; null: the children of the model and of its lists of
            blocks (ModuleList, or nn.Sequential of several blocks of one class).
        checkpoint_activations: what the backward pass computes again instead of keeping it: nothing (none), each block's
            forward pass (block), or a block's forward pass but for matrix multiplications and attention (selective).
        offload: whether parameters, gradients and the optimizer's state are in host memory, and the optimizer's step is on the
            CPU, which takes less memory of the GPU and more time.
    """

    sharded = has_dtensors = True
    averages = compiled_by_block = True
    performance_options = frozenset({"cuda_graph", "compile", "fused"})

    def __init__(
        self,
        runtime: Runtime,
        reshard_after_forward: bool,
        batch_norm: BatchNorm,
        wrap: list[ClassName] | None,
        checkpoint_activations: Checkpointing = "none",
        offload: bool = False,
    ):
        super().__init__(runtime)
        self.reshard_after_forward, self.batch_norm, self.wrap = reshard_after_forward, batch_norm, wrap
        self.checkpointing: Checkpointing = checkpoint_activations
        self.offload = offload
        self.autocast = nullcontext  # fully_shard has its own mixed-precision policy

    def partition(self, model: nn.Module, samples: int) -> None:
        require_shardable(model, self.name, self.offload)
        require_no_batch_norm(model.modules(), self.checkpointing)
        if self.checkpointing != "none" and not isinstance(model, Chain):
            raise ConfigError(
                f"strategy.checkpoint_activations={self.checkpointing}: needs a model that is a Chain of blocks, got "
                f"{type(model).__name__}. Make it one (docs/your-own.md), or use strategy.checkpoint_activations=none"
            )
        found = {type(module).__name__ for module in model.modules()}
        if unknown := [name for name in self.wrap or [] if name not in found]:
            raise ConfigError(
                f"strategy.wrap={listed(self.wrap or [])}: the model has no module of class {unknown[0]}; it has "
                f"{', '.join(sorted(found))}"
            )
        parts = units(model, self.wrap)
        if names := tied_over(model, parts):
            raise ConfigError(
                f"strategy=fsdp: {' and '.join(names)} are the same parameter, in two units that are gathered and updated "
                "separately. Use ddp, or set strategy.wrap to classes of which one contains both, or neither"
            )
        self.refusals = refused(self.checkpointing, self.offload)
        if any(part not in set(model.children()) for part in parts):
            self.refusals["compile"] = (
                f"strategy.wrap={listed(self.wrap or [])} gathers modules within blocks, which would divide a compiled block "
                "into many parts"
            )

    def setup(self, model: nn.Module) -> None:
        mesh = self.runtime.mesh(self.axes)
        # BatchNorm uses the group of the mesh: collectives of one communicator run in order, those of several may deadlock.
        if self.initial_weights is None:
            model.to(self.device)
        self.module = self.forward = set_batch_norm(model, self.batch_norm, mesh.get_group("dp"))
        log_offload(self.offload, self.device)
        shard([*units(model, self.wrap), model], mesh, self.reshard_after_forward, self.runtime.precision, self.offload)
        if self.initial_weights is not None:
            # Now that it is sharded, a rank allocates only its shards.
            fill(model, self.initial_weights, HOST if self.offload else self.device)
        if isinstance(model, Chain) and self.checkpointing != "none":
            model.execute_in([checkpointed(block, self.checkpointing) for block in model])

    def no_sync(self) -> AbstractContextManager[None]:
        return without_sync(self.module)

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        logits = super().predict(inputs)
        forget_order(self.module)
        return logits

    def gradient_norm(self) -> torch.Tensor:
        if self.offload:  # torch would add up the ranks' norms on the host, and NCCL adds up on GPUs only
            squares = [local(gradient).double().square().sum() for gradient in gradients_of(self.parameters())]
            return self.runtime.all_reduce(torch.stack(squares).sum().to(self.device)).sqrt().to(torch.get_default_dtype())
        return cast(DTensor, super().gradient_norm()).full_tensor()
