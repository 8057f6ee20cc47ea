"""Optimizers with the methods train() and eval(), such as schedule-free ones.

They train with other weights than those that are evaluated: `eval()` changes the parameters into
the latter, `train()` back into the former (Defazio et al., The Road Less Scheduled, 2024). Here the
optimizer is in training mode, and the weights of evaluations take the place of averages (ema.py):
evaluations use them, checkpoints hold both, and what reads a checkpoint reads them. The weights
that train are kept meanwhile and come back to the last digit, so that an evaluation or a checkpoint
changes nothing.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ddp_lab.config.build import has_modes
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.dtensor import local, reshard


class EvaluationWeights:
    """The weights of evaluations of an optimizer with two modes. The interface is that of EMA.

    Args:
        strategy: after `Strategy.setup`.
        optimizer: of its parameters, in training mode.

    Attributes:
        averages, tensors, state: empty, because there is nothing that a step must update.
    """

    averages: Mapping[str, torch.Tensor] = {}
    tensors: Mapping[str, torch.Tensor] = {}
    state: tuple[torch.Tensor, ...] = ()

    def __init__(self, strategy: Strategy, optimizer: torch.optim.Optimizer):
        assert has_modes(optimizer)
        self.strategy = strategy
        self.optimizer: Any = optimizer
        # FSDP registers other tensors with the module while a block is gathered, so they are looked
        # up only once.
        self._trained = [
            parameter for parameter in strategy.module.parameters() if parameter.requires_grad
        ]
        self._names = {
            name: parameter
            for name, parameter in strategy.module.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        }
        self._kept: list[torch.Tensor] = []  # the weights that train, during an evaluation

    def update(self) -> None:
        """Do nothing: the optimizer's step has done it."""

    @contextmanager
    def in_use(self) -> Generator[None]:
        """Let the model have the weights of evaluations. Collective."""
        self.strategy.train(False)
        self._begin_use()
        try:
            yield
        finally:
            self.end_use()

    @torch.no_grad()
    def _begin_use(self) -> None:
        reshard(self.strategy.module)
        self._kept = [local(parameter).clone() for parameter in self._trained]
        self.optimizer.eval()

    @torch.no_grad()
    def end_use(self) -> None:
        """Let the model have the weights that train again, if it has the others."""
        if not self._kept:
            return
        reshard(self.strategy.module)
        self.optimizer.train()
        for parameter, kept in zip(self._trained, self._kept, strict=True):
            local(parameter).copy_(kept)
        self._kept = []

    def shards(self) -> dict[str, torch.Tensor]:
        """Return copies of this rank's weights of evaluations by name, DTensors where sharded.

        They and the weights that train need memory twice more for a moment.
        """
        self._begin_use()
        try:
            return {name: parameter.detach().clone() for name, parameter in self._names.items()}
        finally:
            self.end_use()

    def reset_to_weights(self) -> None:
        """Do nothing: `eval()` computes them from the optimizer's state."""

    def resume(self, updates: int) -> None:
        """Do nothing: the optimizer counts by itself."""
