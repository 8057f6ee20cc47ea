"""FSDP2, fully sharded data parallelism: each of W ranks keeps 1/W of every parameter, gradient and momentum tensor.

    rank 0:  shard 0 --+                                                     +-- shard 0 of the summed gradients
                       +-- all_gather -> block -> free ... reduce_scatter <--+
    rank 1:  shard 1 --+                                                     +-- shard 1 of the summed gradients

A block's parameters are gathered from all ranks just before its forward and its backward pass, and freed after each. Its
gradients are summed and scattered, so that each rank gets the sum of its own shard (Rajbhandari et al. 2019, ZeRO stage 3,
arXiv:1910.02054). As under ddp, every rank computes its own local batch; only the memory is sharded.
"""

from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm
from ddp_lab.strategies.fully_shard import Checkpointing, FullyShard
from ddp_lab.strategies.sharding import fill, require_one_place
from ddp_lab.world.runtime import Runtime


class FSDP(FullyShard):
    """Data parallelism by torch.distributed.fsdp.fully_shard, applied to each block and then to the complete model.

    Args:
        reshard_after_forward: whether to free a block's gathered parameters after its forward pass and gather them again for
            its backward pass, which takes less memory and 1.5 times the communication.
    """

    sharded = True

    def __init__(
        self,
        runtime: Runtime,
        reshard_after_forward: bool,
        batch_norm: BatchNorm,
        checkpoint_activations: Checkpointing = "none",
    ):
        super().__init__(runtime, batch_norm, checkpoint_activations)
        self.reshard_after_forward, self.averaged = reshard_after_forward, self.dp_size

    def partition(self, model: nn.Module, samples: int) -> None:
        super().partition(model, samples)
        if self.checkpointing != "none" and not isinstance(model, Chain):
            raise ConfigError(
                f"strategy.checkpoint_activations={self.checkpointing}: needs a model that is a Chain of blocks, got "
                f"{type(model).__name__}. Make it one (docs/your-own.md), or use strategy.checkpoint_activations=none"
            )
        parts = units(model)
        every = model.named_modules(remove_duplicate=False)  # the same layer in two places is in one unit
        paths = {f"{path}.": module for path, module in every if module in parts}

        def unit_of(name: str) -> nn.Module | None:
            return paths.get(max((path for path in paths if name.startswith(path)), key=len, default=""))

        require_one_place(model, self.name, unit_of, "is in another unit, gathered and updated separately")
        if not set(parts) <= set(model.children()):
            self.refusals["compile"] = "fsdp gathers modules within a block, which would divide the compiled block"

    def setup(self, model: nn.Module) -> None:
        mesh = self.runtime.mesh(self.axes)
        # BatchNorm uses the group of the mesh: collectives of one communicator run in order, those of several may deadlock.
        if self.initial_weights is None:
            model.to(self.device)
        self.module = self.forward = set_batch_norm(model, self.batch_norm, mesh.get_group("dp"))
        self.shard([*units(model), model], mesh, self.reshard_after_forward)
        if self.initial_weights is not None:
            fill(model, self.initial_weights, self.device)  # now that it is sharded, a rank allocates only its shards
        if isinstance(model, Chain):
            self.checkpoint_blocks(model)

    def gradient_norm(self) -> torch.Tensor:
        return cast(DTensor, super().gradient_norm()).full_tensor()


def units(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together, inner modules before those that contain them.

    They are the children of the model and of its lists of blocks that have parameters.
    """
    parents = [model, *filter(is_list, model.modules())]
    found = [child for parent in parents for child in parent.children() if any(True for _ in child.parameters())]
    found = [child for child in found if not is_list(child)]
    depth = {module: name.count(".") for name, module in model.named_modules()}
    return sorted(dict.fromkeys(found), key=lambda module: -depth[module])


def is_list(module: nn.Module) -> bool:
    """Return whether a module is a list of blocks: a ModuleList, or an nn.Sequential with several blocks of one class.

    A block has modules of its own and is no nn.Sequential. An nn.Sequential of such lists is a list, too.
    """
    if not isinstance(module, nn.Sequential):
        return isinstance(module, nn.ModuleList)
    blocks = [child for child in module.children() if not isinstance(child, nn.Sequential) and any(child.children())]
    return len({type(block) for block in blocks}) < len(blocks) or any(map(is_list, module.children()))
