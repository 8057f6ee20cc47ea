"""The exponential moving average (EMA) of the weights.

It often has a better test accuracy than the weights themselves.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ddp_lab.models.real_view import real_view
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.dtensor import local, reshard, sharded_as
from ddp_lab.training.counted_averages import CountedAverages


class EMA:
    """Averages of this rank's part of the model.

    After each optimizer step, average = decay * average + (1 - decay) * weight.

    With `warmup` the decay of the first steps is smaller (counted_averages.py).

    The sum is elementwise, so each rank averages its own shards, and the result depends neither on
    the strategy nor on the number of ranks. Buffers (BatchNorm's statistics) are averaged like
    weights, as by timm and torchvision's reference scripts; integer buffers are copied. Without
    synchronised BatchNorm, the averages of replica 0's statistics count.

    torch.optim.swa_utils.AveragedModel copies the module, which is not possible for a sharded or a
    cut one.

    Args:
        strategy: after `Strategy.setup`. The averages start from its weights.
        decay: at least 0 and below 1. About 1 / (1 - decay) steps are averaged.
        warmup: whether the decay warms up.

    Attributes:
        averages: this rank's shards, by name, of the trained parameters and the buffers. The
            tensors stay the same; while `in_use` is active, they hold the weights.
        counted: updates the averages and counts their updates; None: the decay does not warm up,
            and every step is followed by an update.
    """

    def __init__(self, strategy: Strategy, decay: float, warmup: bool):
        self.strategy = strategy
        module = strategy.module
        trained = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        # FSDP registers other tensors with the module while a block is gathered, so they are looked
        # up only once.
        self.tensors: dict[str, torch.Tensor] = trained | dict(module.named_buffers())
        self.averages = {
            name: local(tensor.detach()).resolve_conj().clone()
            for name, tensor in self.tensors.items()
        }

        everything = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        names = {id(tensor): name for name, tensor in self.tensors.items()}
        # also of tied weights
        self._names = {
            name: names[id(tensor)] for name, tensor in everything if id(tensor) in names
        }
        # as pairs of real numbers if they are complex
        self._fractions = {
            name: real_view(each)
            for name, each in self.averages.items()
            if each.is_floating_point() or each.is_complex()
        }
        self._average = get_ema_multi_avg_fn(decay)
        self.counted: CountedAverages | None = None
        if warmup or strategy.loss_scale is not None:
            self.counted = CountedAverages(self._fractions, decay, warmup)
        self._swapped = False

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step to the averages, unless precision=fp16 has skipped it.

        It does not wait for the device; a CUDA graph can capture it.
        """
        weights = {name: local(self.tensors[name]) for name in self.averages}
        if self.counted is not None:
            scale = self.strategy.loss_scale
            values = {name: real_view(weights[name]) for name in self._fractions}
            self.counted.update(values, None if scale is None else scale.not_finite)
        elif self._fractions:
            values = [real_view(weights[name]) for name in self._fractions]
            # the number of steps is not used
            self._average(list(self._fractions.values()), values, 0)
        for name, average in self.averages.items():
            if name not in self._fractions:
                average.copy_(weights[name])

    @contextmanager
    def in_use(self) -> Generator[None]:
        """Let the model have the averages as its weights, for an evaluation. Collective."""
        # every replica gets replica 0's buffers; the evaluation does this for their averages
        self.strategy.train(False)
        self._swap()
        try:
            yield
        finally:
            self.end_use()

    def end_use(self) -> None:
        """Let the model have its own weights again, if it has the averages."""
        if self._swapped:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange weights and averages in place, one by one, with no second copy of the model."""
        reshard(self.strategy.module)
        for name, average in self.averages.items():
            weight = local(self.tensors[name])
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)
        self._swapped = not self._swapped

    def shards(self) -> dict[str, torch.Tensor]:
        """Return this rank's averages by name, as DTensors where the weights are sharded.

        Nothing is copied.
        """
        return {
            name: sharded_as(self.tensors[names], self.averages[names])
            for name, names in self._names.items()
        }

    def reset_to_weights(self) -> None:
        """Let the averages start from the weights."""
        for name, average in self.averages.items():
            average.copy_(local(self.tensors[name].detach()))

    def resume(self, updates: int) -> None:
        """Continue as after this number of updates of the averages, loaded or begun again."""
        if self.counted is not None:
            self.counted.resume(updates)

    @property
    def state(self) -> list[torch.Tensor]:
        """The tensors that an update changes."""
        counts = self.counted.updates.values() if self.counted is not None else ()
        return [*self.averages.values(), *counts]
