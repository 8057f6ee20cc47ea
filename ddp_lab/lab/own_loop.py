"""The methods of a trainer for a loop that calls the model and the backward pass itself."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from ddp_lab.data.trees import require_no_arrays
from ddp_lab.lab.calls import Calls
from ddp_lab.lab.draws import Draws
from ddp_lab.lab.local_batches import CurrentBatch, LocalBatches
from ddp_lab.lab.loop_position import LoopPosition
from ddp_lab.lab.model_mistakes import mistakes_reported
from ddp_lab.lab.own_step import OwnStep
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.step import Step


class OwnLoop:
    """The methods of `Trainer` for steps that are made of parts."""

    strategy: Strategy
    eager_step: Step
    batch_size: int
    _batches: LocalBatches
    _calls: Calls
    _loop: LoopPosition

    def prepare_own_steps(self, number: int) -> None:
        """Prepare the methods below, after `Strategy.setup`.

        Args:
            number: of the trainer in its Lab.
        """
        self._own_step = OwnStep(self.eager_step, number)
        seed = self.eager_step.options.seed
        self._draws = Draws(self.strategy, self.batch_size, seed, number)
        self.strategy.refuse_bare_calls()

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the outputs of the model in training mode, with a gradient. Collective.

        The first call after an `update` begins a step, unless it is within torch.no_grad().

        Args:
            *arguments: of the model. Tensors are those of this rank, [b, ...]; a rank may have no
                sample: b = 0.
            **keywords: of the model, likewise.

        Returns:
            The outputs as the model returns them.

        Raises:
            ConfigError: the strategy does not call the complete model (split, pipeline,
                ddp_pipeline, tp, mesh).
        """
        step = self._own_step
        step.require_supported("forward")
        require_no_arrays("forward", *arguments, **keywords)
        current = self._batches.current
        self._begin_own_step(current)
        spare, _ = current.spare if current else (None, None)
        with mistakes_reported(self.strategy):
            return step.forward(arguments, keywords, spare)

    def backward(self, loss_sum: torch.Tensor, weight: float | torch.Tensor) -> None:
        """Add the gradient of a loss to those of this step. Collective.

        Called once in a step, but for the parts in `accumulating`: all terms of a loss belong into
        one sum.

        Args:
            loss_sum: sum over this rank's samples, [].
            weight: weight of this sum, for example the number of its samples. `update` divides by
                the sum of all weights over parts and ranks.

        Raises:
            ConfigError: the loss is no sum, has no gradient, or is the second one of the step.
        """
        self._own_step.require_supported("backward")
        with mistakes_reported(self.strategy):
            self._own_step.backward(loss_sum, weight)

    def accumulating(self) -> AbstractContextManager[None]:
        """Return the context of `forward` and `backward` for all parts of a batch but the last.

        Only the last part's backward pass sends gradients.

        Raises:
            ConfigError: the gradients of this step have been sent.
        """
        self._own_step.require_supported("accumulating")
        return self._own_step.accumulating()

    def frozen(self) -> AbstractContextManager[None]:
        """Return the context in which another trainer's gradients pass through this model.

        Its own gradients stay as they are. `forward` of it and `backward` of the other trainer
        belong into the context.
        """
        self._own_step.require_supported("frozen")
        return self._own_step.frozen()

    def update(self) -> torch.Tensor:
        """Divide the gradients by the sum of all weights, clip them, and update the weights.

        Collective. The optimizer and the schedule take one step.

        Returns:
            The sum of all losses over the sum of their weights, over parts and ranks, [], on this
                rank's device; 0 if that is 0.

        Raises:
            ConfigError: there was no backward pass, or none outside of `accumulating`.
        """
        self._own_step.require_supported("update")
        loss = self._own_step.update()
        self._loop.count_step(self._batches.current)
        return loss

    def randn(self, *shape: int, name: str) -> torch.Tensor:
        """Return normally distributed numbers, the same for any number of ranks.

        They are rows of numbers that are drawn for the GLOBAL batch, by the seed of the Lab, the
        number of the trainer, the step and the name.

        Args:
            shape: [b, ...] with a row for each sample of this rank.
            name: of what is drawn. Each name is drawn once in a step.

        Raises:
            ConfigError: the shape has more rows than this rank has samples, or the name was drawn
                in this step before.
        """
        self._own_step.require_supported("randn")
        return self._draws.randn(shape, name, self.eager_step.scheduler.last_epoch)

    def _begin_own_step(self, current: CurrentBatch | None) -> None:
        if self._own_step.is_begun:
            return
        if self._own_step.is_frozen or not torch.is_grad_enabled():
            self._set_training()
            return
        self._begin_step(current)
        global_size = current.global_size if current else self.batch_size
        self._own_step.begin(global_size)

    def _begin_step(self, current: CurrentBatch | None) -> None: ...

    def _set_training(self) -> None: ...
