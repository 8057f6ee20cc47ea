"""FSDP2, fully sharded data parallelism: each of W ranks keeps 1/W of the training's state.

That is 1/W of every parameter, gradient and momentum tensor.

    rank 0:  shard 0 --+                                                   +-> shard 0 of the sum
                       +-- all_gather -> block -> free ... reduce_scatter -+
    rank 1:  shard 1 --+                                                   +-> shard 1 of the sum

A block's parameters are gathered from all ranks just before its forward and its backward pass, and
freed after each. Its gradients are summed and scattered, so that each rank gets the sum of its own
shard (Rajbhandari et al. 2019, ZeRO stage 3, arXiv:1910.02054). As under ddp, every rank computes
its own local batch; only the memory is sharded.

torch's `fully_shard` does this (fully_shard.py). It gathers with collectives, which all ranks must
call in the same order, so what it gathers together, a unit, and when, must agree:

    find_units       the parts that are gathered alone: the blocks, or what their steps call
    UnitOrder        compares the order in which the ranks call the units, before they would wait
    Uses             reports a unit that a step calls and the trial did not, and what to do
    UnitHooks        counts gradients of units that a rank has not used as zeros; `drop_unused`
                     makes those None that no rank has used, as on one device
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_lab.config.types import ModulePattern
from ddp_lab.data.trees import Tree
from ddp_lab.models.chain import Chain
from ddp_lab.models.trial import some
from ddp_lab.models.usage import find_usage
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm
from ddp_lab.strategies.fully_shard import FullyShard
from ddp_lab.strategies.parameters import fill, make_contiguous
from ddp_lab.strategies.unit_advice import Advice
from ddp_lab.strategies.unit_hooks import UnitHooks
from ddp_lab.strategies.unit_order import UnitOrder
from ddp_lab.strategies.unit_uses import Uses
from ddp_lab.strategies.units import find_units, require_one_dtype
from ddp_lab.strategies.unused import unsupported_with_unused
from ddp_lab.world.runtime import Runtime


class FSDP(FullyShard):
    """Data parallelism by torch.distributed.fsdp.fully_shard, of each block and then the model.

    Args:
        reshard_after_forward: whether to free a block's gathered parameters after its forward pass
            and gather them again for its backward pass, which takes less memory and 1.5 times the
            communication.
        keep_whole: names of modules, or patterns of names such as experts.*, whose parameters are
            gathered with the module around them instead of separately: those that a step may leave
            out on some ranks only.
        find_unused_parameters: whether steps may use some of the parameters only. Then those that
            the two samples of the trial do not use are not frozen, and padding does not count as a
            use.
    """

    sharded = True
    supports_own_steps = True
    computes_head_losses = True

    def __init__(
        self,
        runtime: Runtime,
        reshard_after_forward: bool,
        batch_norm: BatchNorm,
        keep_whole: list[ModulePattern] | None = None,
        find_unused_parameters: bool = False,
    ):
        super().__init__(runtime, batch_norm)
        self.find_unused_parameters = find_unused_parameters
        self.unsupported |= unsupported_with_unused(self)
        self.reshard_after_forward = reshard_after_forward
        self.keep_whole = [str(pattern) for pattern in keep_whole or []]
        self.units: list[nn.Module] = []

    def partition(self, model: nn.Module, samples: int) -> None:
        super().partition(model, samples)
        usage = None
        # a Chain calls all its blocks
        if self.example is not None and not isinstance(model, Chain):
            usage = find_usage(model, self.example)
        self.units = find_units(model, usage, self.keep_whole)
        require_one_dtype(
            [*self.units, model], {module: name for name, module in model.named_modules()}
        )

        if not set(self.units) <= set(model.children()):
            self.unsupported["compile"] = (
                "fsdp gathers modules within a block, which would divide the compiled block"
            )

    def setup(self, model: nn.Module) -> None:
        mesh = self.runtime.mesh(self.axes)
        self.group = mesh.get_group("dp")
        # BatchNorm uses the group of the mesh: collectives of one communicator run in order, those
        # of several may deadlock.
        if self.initial_weights is None:
            model.to(self.device)

        make_contiguous(model)
        self.module = set_batch_norm(model, self.batch_norm, self.group)
        self.forward = self.module
        names = {module: name for name, module in model.named_modules()}
        advice = Advice([*names.values()], [names[unit] for unit in self.units], self.keep_whole)
        self.uses = Uses(model, advice, self.example is not None)
        self.hooks = UnitHooks(model, UnitOrder(self.runtime, self.name, advice))
        self.shard([*self.units, model], mesh, self.reshard_after_forward)
        if self.initial_weights is not None:
            # now that it is sharded, a rank allocates only its shards
            fill(model, self.initial_weights, self.device)

    def shard_unit(self, unit: nn.Module, shard: Callable[[nn.Module], object]) -> None:
        self.hooks.before_sharding(unit)
        super().shard_unit(unit, shard)
        self.hooks.after_sharding(unit)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        with self.hooks.no_sync(), super().no_sync():
            yield

    def add_gradient(
        self, inputs: Tree, targets: Tree, num_valid: int, divisor: float | torch.Tensor
    ) -> torch.Tensor:
        with self.pass_context(inputs, num_valid > 0):
            return super().add_gradient(inputs, targets, num_valid, divisor)

    @contextmanager
    def pass_context(self, inputs: Any, has_samples: bool) -> Generator[None]:
        self.hooks.has_samples = has_samples
        with self.uses.reported(self.runtime.rank, inputs):
            yield

    def forget_passes(self) -> None:
        self.hooks.forget_step()

    def predict(self, inputs: Tree) -> Any:
        with self.uses.reported(self.runtime.rank, inputs):
            return super().predict(inputs)

    def reduce_gradients(self) -> None:
        self.hooks.drop_unused(self.group, self.device)

    def describe(self) -> str:
        names = [name for name, module in self.module.named_modules() if module in self.units]
        gathered = f"separately: {some(names)}" if names else "together"
        return f"{super().describe()}, parameters gathered {gathered}"

    def gradient_norm(self) -> torch.Tensor:
        return cast(DTensor, super().gradient_norm()).full_tensor()
