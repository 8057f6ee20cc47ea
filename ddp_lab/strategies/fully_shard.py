"""What `fsdp` and `mesh` share: torch's `fully_shard` of parts."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.trees import Tree
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.batch_norm import BatchNorm, is_batch_norm
from ddp_lab.strategies.dtensor import reshard
from ddp_lab.strategies.later_writes import PartWatch, watch_gathering, watch_parts
from ddp_lab.strategies.parameter_hooks import require_no_hooks
from ddp_lab.world.runtime import Runtime


class FullyShard(Strategy):
    """A strategy whose `setup` calls `shard`. Its parameters are DTensors."""

    compiled_by_block = True
    replaces_parameters = True
    copies_weights = True
    supported_options = frozenset({"cuda_graph", "compile", "fused"})

    def __init__(self, runtime: Runtime, batch_norm: BatchNorm):
        super().__init__(runtime, batch_norm=batch_norm)
        self.autocast = nullcontext  # fully_shard has its own mixed-precision policy

    @property
    def may_leave_unused(self) -> bool:
        return True  # unit_gradients.py completes them

    def partition(self, model: nn.Module, samples: int) -> None:
        super().partition(model, samples)
        if not self.replaces_parameters:  # the traced stages of a mesh
            return
        require_no_hooks(model, self.name)
        scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
        if scalars:
            raise ConfigError(
                f"strategy={self.name}: cannot shard the parameter {scalars[0]}, which has no "
                "dimensions. Give it the shape [1], or use another strategy, for example ddp"
            )

        for name, parameter in model.named_parameters():
            if not parameter.numel() and parameter.size(0):
                raise ConfigError(
                    f"strategy={self.name}: cannot shard the parameter {name} of shape "
                    f"{list(parameter.shape)}, which has no elements. Let its first dimension be "
                    "0, remove it, or use another strategy, for example ddp"
                )

    def shard(
        self, parts: Sequence[nn.Module], mesh: DeviceMesh, reshard_after_forward: bool
    ) -> None:
        """Shard the parameters of each part over the ranks of `mesh`, in place.

        Args:
            parts: inner modules before those that contain them; the last one contains all others.
            mesh: of one dimension; or of two, along the first of which the shards are replicated.
            reshard_after_forward: whether to free a part's gathered parameters between its forward
                and its backward pass.
        """
        shard = partial(fully_shard, mesh=mesh, reshard_after_forward=reshard_after_forward)
        policy = MixedPrecisionPolicy()
        # in which the parts compute, with float32 shards and sums of gradients
        half = self.runtime.half
        if half is not None:
            policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
            # BatchNorm's kernels need parameters in float32, as the statistics are; the inputs may
            # be in half precision.
            for layer in filter(is_batch_norm, parts[-1].modules()):
                keep = MixedPrecisionPolicy(cast_forward_inputs=False)
                self.shard_unit(layer, partial(shard, mp_policy=keep))

        # not at the top: it loads torch.compile in 1 s
        copy = cast("Callable[..., Any]", torch.compiler.disable(copy_views))
        watches: list[tuple[nn.Module, PartWatch]] = []
        if self.watches_writes:
            # before torch's own hooks, which gather a part and free it
            watches = watch_parts(parts, parts[-1], self)
        for part in parts:
            # before torch's own hook, which is not compiled, either
            part.register_forward_hook(copy)
            self.shard_unit(part, partial(shard, mp_policy=policy))
        watch_gathering(watches)
        for part in sharded_in(parts[-1]):
            # the gradients of the ranks are summed, not averaged
            part.set_gradient_divide_factor(1.0)
            # gloo has no other reduction with a factor
            part.set_force_sum_reduction_for_comms(True)

    def shard_unit(self, unit: nn.Module, shard: Callable[[nn.Module], object]) -> None:
        """Shard the parameters of a module that are not sharded yet, in place, by `shard`."""
        shard(unit)

    def train(self, mode: bool = True) -> None:
        # An evaluation may leave the blocks gathered, and a captured step changes the shards
        # without reading them.
        reshard(self.module)
        super().train(mode)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        # Backward passes leave the gradients unsharded meanwhile, which costs the memory that
        # sharding them saves.
        assert isinstance(self.forward, FSDPModule)
        self.forward.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.forward.set_requires_gradient_sync(True)

    def predict(self, inputs: Tree) -> Any:
        logits = super().predict(inputs)
        forget_order(self.module)
        return logits


def forget_order(module: nn.Module) -> None:
    """Let torch forget in which order the parts of `module` ran forward.

    Called after a forward pass without a backward pass.

    A backward pass gathers parts in advance, in the reverse order of all forward passes since the
    last one. With those of an evaluation before it, it gathers one part too many, whose buffer
    torch frees early: the next forward pass then computed with wrong parameters if it followed at
    once, as in gradient accumulation (torch 2.11, two H200s). There is no public function.
    """
    for part in sharded_in(module):
        part._get_fsdp_state()._comm_ctx.post_forward_order.clear()  # pyright: ignore[reportPrivateUsage]


def sharded_in(module: nn.Module) -> list[FSDPModule]:
    """Return the parts of `module`, and the module itself, that `FullyShard.shard` has sharded."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def copy_views(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """Return the output of a part with copies of the tensors that are views.

    torch gathers a part for its backward pass in a hook on its output. If the output is a view, for
    example the last output of an LSTM, and is then changed in place, torch drops this hook, and the
    backward pass fails or is wrong. torch only warns.
    """
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor if tensor._base is None else tensor.clone(), output
    )
