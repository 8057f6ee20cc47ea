"""BatchNorm under data parallelism.

local: each rank normalises by the mean and variance of its local batch, so the result depends on
       the number of ranks.
sync:  all ranks normalise by the mean and variance of the global batch, as one device would. This
       costs two small collectives per layer in the forward pass and two in the backward pass. The
       padding of a partial last batch is excluded from the statistics
       (`Strategy.forward_backward`), also on a rank that has nothing else.
"""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage], the only base of all BatchNorms

from ddp_lab.config.errors import ConfigError
from ddp_lab.config.types import BatchNorm
from ddp_lab.data.trees import Tree
from ddp_lab.strategies.batch_statistics import ALLOWED, why_unsupported
from ddp_lab.strategies.batch_trial import other_statistics

Model = TypeVar("Model", bound=nn.Module)


class SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' tensors, from which each rank computes its own loss.

    None as the group means all ranks.

    The gradient is therefore the sum of all ranks' gradients. torch's own function is deprecated
    since torch 2.15.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, tensor: torch.Tensor, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        ctx.group = group  # pyright: ignore[reportAttributeAccessIssue]
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm that normalises by the statistics of the global batch.

    `set_batch_norm` makes it of another one.

    The child modules of the other one, which it calls after the normalisation, are called here,
    too.

    It replaces torch.nn.SyncBatchNorm, which has no CPU kernels, and whose backward pass gives a
    rank with an empty local batch no gradient at all: under FSDP that rank skipped collectives, and
    both ranks hung (two H200s, torch 2.11).

    Attributes:
        sum_over_ranks: returns the sum of all ranks' tensors, [n]; differentiable.
        is_padding: whether the local batch is only padding, which does not count in the statistics.
    """

    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]
    is_padding = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise [b, channels, ...]. In training this is collective.

        Raises:
            ValueError: the global batch has one value per channel; on all ranks.
        """
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        assert self.running_mean is not None
        dtype = input.dtype
        # sums in bf16 are too coarse for statistics
        inputs = input.to(self.running_mean.dtype)
        counted = 0 if self.is_padding else len(input)
        local_count = counted * math.prod(input.shape[2:])
        per_channel = [dim for dim in range(input.dim()) if dim != 1]
        shape = [-1, *[1] * (input.dim() - 2)]
        size = inputs.new_full((1,), local_count)
        total = self.sum_over_ranks(torch.cat([inputs[:counted].sum(per_channel), size]))
        mean = total[:-1] / total[-1]

        count = total[-1].detach()
        # The host waits for the count only on a rank with at most one value. If the global batch
        # has at most one, that is every rank, so that all of them go the same way; a rank with
        # several values knows that the global batch has them, too.
        if local_count <= 1 and count <= 1:
            return self._without_variance(input, int(count))

        centred = inputs - mean.view(shape)
        variance = self.sum_over_ranks(centred[:counted].square().sum(per_channel)) / count
        self._update_running_statistics(mean, variance * count / (count - 1))
        weight = cast("nn.Parameter | None", self.weight)
        bias = cast("nn.Parameter | None", self.bias)
        scale = (variance + self.eps).rsqrt()
        normalised = centred * (scale if weight is None else weight * scale).view(shape)
        if bias is not None:
            normalised = normalised + bias.view(shape)

        normalised = normalised.to(dtype)
        for child in self.children():
            normalised = child(normalised)
        return normalised

    def _without_variance(self, input: torch.Tensor, count: int) -> torch.Tensor:
        """Return outputs for mere padding, or raise torch's error about one value per channel.

        Args:
            input: the local batch, [b, channels, ...].
            count: values per channel of the global batch, 0 or 1.
        """
        if count == 1:
            return super().forward(input.new_zeros(1, *input.shape[1:]))
        self.training = False  # by the running statistics, which stay as they are
        try:
            return super().forward(input)
        finally:
            self.training = True

    @torch.no_grad()
    def _update_running_statistics(
        self, mean: torch.Tensor, unbiased_variance: torch.Tensor
    ) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = 1 / self.num_batches_tracked.to(mean) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(unbiased_variance, momentum)


@cache
def synchronised(kind: type[_BatchNorm]) -> type[SyncBatchNorm]:
    """Return the subclass of a BatchNorm layer's class that synchronises the statistics."""
    return type(f"Synchronised{kind.__name__}", (SyncBatchNorm, kind), {})


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether a module has BatchNorm."""
    return any(map(is_batch_norm, model.modules()))


def set_batch_norm(model: Model, mode: BatchNorm, group: dist.ProcessGroup | None = None) -> Model:
    """Make a SyncBatchNorm of every BatchNorm layer of `model` if `mode` is "sync". In place.

    Only the class of a layer is changed, so its parameters, names, hooks and other references to it
    stay.

    Args:
        model: already on its device.
        mode: "local" leaves the model as it is.
        group: ranks whose local batches are normalised together; None: all ranks.

    Returns:
        The model.

    Raises:
        ConfigError: a layer keeps statistics of its batch in a way that is not known
            (batch_statistics.py).
    """
    if mode == "local":
        return model
    require_supported(model, mode, one_process=False)
    # Excluded from compilation: with it compiled, ResNet-18's step was wrong (weights differed by
    # 0.15; two H200s, torch 2.11).
    total = cast(
        "Callable[[torch.Tensor], torch.Tensor]",
        torch.compiler.disable(lambda sums: SumOverRanks.apply(sums, group)),
    )
    for layer in filter(is_batch_norm, model.modules()):
        if not isinstance(layer, SyncBatchNorm):
            layer.__class__ = synchronised(cast("type[_BatchNorm]", type(layer)))
        cast(SyncBatchNorm, layer).sum_over_ranks = total
    return model


@contextmanager
def padding_ignored(module: nn.Module) -> Generator[None]:
    """Let the local batches of the body, which are only padding, not count in the statistics.

    A layer with statistics of its own rank normalises by its running statistics meanwhile: one
    sample has no variance.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, SyncBatchNorm)]
    local = [
        layer
        for layer in module.modules()
        if is_batch_norm(layer) and layer.training and layer not in layers
    ]
    for layer in layers:
        layer.is_padding = True

    for layer in local:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_padding = False
        for layer in local:
            layer.training = True


def require_supported(model: nn.Module, mode: BatchNorm, one_process: bool) -> None:
    """Check that every layer that keeps statistics of its batch can keep those that the mode needs.

    Args:
        model: complete, or a part of it; on any device.
        mode: as in `set_batch_norm`.
        one_process: whether there is no process group, without which torch's SyncBatchNorm is a
            plain BatchNorm.

    Raises:
        ConfigError: a layer cannot; the message names it.
    """
    for name, layer in model.named_modules():
        place = f"{name or 'that is the model'}, {' '.join(str(layer).split())}"
        reason = ""
        if mode == "sync" and not isinstance(layer, SyncBatchNorm):
            reason = why_unsupported(layer)
        if reason:
            raise ConfigError(
                f"strategy.batch_norm=sync: does not support the layer {place}: {reason}. Allowed: "
                f"{ALLOWED}. Use strategy.batch_norm=local"
            )

        if mode == "local" and not one_process and isinstance(layer, nn.SyncBatchNorm):
            raise ConfigError(
                f"strategy.batch_norm=local: does not support the layer {place}, which computes "
                "its statistics over all ranks, whatever they hold. Use an nn.BatchNorm2d, or "
                "strategy.batch_norm=sync, which takes its place"
            )


def require_no_others(model: nn.Module, example: Tree) -> None:
    """Check by a trial that a model computes no statistics of its batch outside BatchNorm layers.

    Args:
        model: complete.
        example: two samples, on the meta device.

    Raises:
        ConfigError: it does; the message names the module.
    """
    if problem := other_statistics(model, example):
        name, reason = problem
        place = f"{name or 'that is the model'}, {type(model.get_submodule(name)).__name__}"
        raise ConfigError(
            f"strategy.batch_norm=sync: does not support the module {place}: {reason}. "
            "Use a BatchNorm layer of torch there, or strategy.batch_norm=local"
        )


def is_batch_norm(layer: nn.Module) -> bool:
    """Return whether `layer` is any of torch's BatchNorm layers: 1d, 2d, 3d or synchronised."""
    return isinstance(layer, _BatchNorm)
