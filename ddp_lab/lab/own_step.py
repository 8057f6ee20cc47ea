"""A step of a user's own: the loop calls the model and the backward pass, in parts if it wants.

    outputs = trainer.forward(inputs)          the model, as the strategy calls it
    trainer.backward(loss_sum, weight)         adds gradients of a sum; the last part sends them
    trainer.update()                           divides by all weights, clips, optimizer, schedule

What is divided by is known only at the end: the sum of the weights over all parts and ranks. The
mean of the means of parts or ranks would be another value.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.seeds import seed_of
from ddp_lab.data.trees import Tree
from ddp_lab.lab.spare_rows import SpareRows, have_samples, tensors_of, without_rows
from ddp_lab.models.outputs import map_outputs
from ddp_lab.strategies.base import gradients_of, total
from ddp_lab.strategies.frozen import without_gradients
from ddp_lab.strategies.micro_batches import surroundings
from ddp_lab.tasks.base import sum_dtype
from ddp_lab.training.step import Step

WAY_OUT = (
    "Use trainer.step with a loss function, or strategy=single, scratch, ddp or fsdp, which call "
    "the complete model"
)


class OwnStep:
    """The parts of the step that a loop computes by itself.

    Args:
        step: of the trainer.
        number: of the trainer in its Lab.

    Attributes:
        is_begun: whether `forward` was called with gradients since the last update.
        is_frozen: whether gradients pass through the model, which takes no step then.
    """

    def __init__(self, step: Step, number: int):
        self.step = step
        self.number = number
        self.strategy = step.strategy
        self.is_begun = False
        self._accumulates = False
        self._has_sent = False  # the backward pass that sends the gradients is done
        self.is_frozen = False
        self._sums = torch.zeros(0)  # [loss_sum, weight] of this rank's parts
        self._has_gradients = False  # `backward` was called in this step
        self._spare_rows = SpareRows(step.strategy.device)
        self._passes = 0  # forward passes of this step

    def require_supported(self, method: str) -> None:
        """Check that the strategy lets a loop call the model and the backward pass.

        Args:
            method: called by the user, for the message.

        Raises:
            ConfigError: the strategy computes forward and backward passes by itself.
        """
        if not self.strategy.supports_own_steps:
            raise ConfigError(
                f"{method}: is not supported by strategy={self.strategy.name}, which computes the "
                f"forward and backward passes of a batch by itself. {WAY_OUT}"
            )

    def require_ended(self, method: str) -> None:
        """Check that no step is under way, of which the gradients would be lost or mixed.

        Args:
            method: called by the user, for the message.

        Raises:
            ConfigError: `forward` was called, and `update` was not.
        """
        if self.is_begun:
            raise ConfigError(
                f"{method}: a step of this trainer is under way, which trainer.forward has begun. "
                "Call trainer.update() first; outputs that need no gradient are computed by "
                "trainer.forward within torch.no_grad(), which begins no step"
            )

    def begin(self, global_size: int) -> None:
        """Begin a step, in training mode.

        Args:
            global_size: samples of the GLOBAL batch.

        Raises:
            ConfigError: the model has gradients that no step of this trainer has computed.
        """
        self._require_no_gradients("forward")
        self.step.prepare()
        self.strategy.prepare_step()
        self.strategy.begin_batch(global_size, in_loop=True)
        device = self.strategy.device
        self._sums = torch.zeros(2, dtype=sum_dtype(device), device=device)
        self.is_begun = True

    def _require_no_gradients(self, method: str) -> None:
        for name, parameter in self.strategy.module.named_parameters():
            if parameter.grad is not None:
                raise ConfigError(
                    f"{method}: the parameter {name} has a gradient that no step of this trainer "
                    "has computed: a backward pass of another trainer has passed through the "
                    "model. Use `with trainer.frozen():` around its forward and that backward pass"
                )

    def _seed_pass(self) -> None:
        """Seed what a forward pass draws, such as dropout masks: others on each replica."""
        strategy = self.strategy
        key = seed_of(
            "masks of a pass",
            seed=self.step.options.seed,
            trainer=self.number,
            step=self.step.scheduler.last_epoch,
            number=self._passes,
            replica=strategy.dp_rank,
        )
        self._passes += 1
        self.step.seed(key)

    def forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any], spare: Tree) -> Any:
        """Return the outputs of the model, with a gradient.

        Args:
            arguments, keywords: of the model, whose tensors are [b, ...].
            spare: inputs of a sample, with which a rank is padded that never had one; None: there
                are none.

        Raises:
            ConfigError: the rank has no sample, and padding would count.
        """
        has_samples = have_samples(tensors_of((arguments, keywords)))
        if self._accumulates:
            # of several parts, which `gather` must not compare
            self.strategy.begin_batch(self.strategy.global_size, accumulate=2, in_loop=True)
        strategy = self.strategy
        if not has_samples and strategy.find_unused_parameters:
            raise ConfigError(
                f"forward: rank {strategy.runtime.rank} has no sample, and with "
                "find_unused_parameters=True the parameters that padding uses would count as used. "
                "Leave out such batches on all ranks, or use trainer.step"
            )
        inputs = self._spare_rows.place((arguments, keywords), spare)
        self._seed_pass()
        passing = strategy.pass_context(inputs, has_samples)
        with passing, surroundings(strategy, None, has_samples), strategy.autocast():
            arguments, keywords = inputs
            outputs = self._module()(*arguments, **keywords)
        if strategy.sharded:
            map_outputs(self._watch_backward, outputs)
        return outputs if has_samples else map_outputs(without_rows, outputs)

    def _watch_backward(self, output: torch.Tensor) -> torch.Tensor:
        """Refuse backward passes in which sharded parameters would get wrong gradients."""
        if output.requires_grad:
            output.register_hook(partial(self._check_backward, self.is_frozen))
        return output

    def _check_backward(self, was_frozen: bool, gradient: torch.Tensor) -> None:
        name = self.strategy.name
        if torch.is_grad_enabled():
            raise ConfigError(
                f"strategy={name}: gradients of gradients (create_graph=True), as of a gradient "
                "penalty, are not supported: the parameters are freed before they are needed "
                "again. Use strategy=ddp or scratch"
            )
        if was_frozen and not self.is_frozen:
            raise ConfigError(
                f"strategy={name}: a backward pass goes through a model after its `with "
                "trainer.frozen():` has ended. Put forward and backward into the same context"
            )

    def _module(self) -> torch.nn.Module:
        """Return what a forward pass calls."""
        strategy = self.strategy
        if self.is_frozen and not strategy.sharded:
            return strategy.module  # a wrapper would wait for gradients of its own
        return strategy.forward

    def backward(self, loss_sum: Any, weight: Any) -> None:
        """Add the gradient of a sum of losses.

        Args:
            loss_sum: of this rank's samples, [].
            weight: what its gradient, summed over parts and ranks, is divided by, summed likewise.

        Raises:
            ConfigError: the loss has another shape or no gradient, the weight is negative, or the
                gradients of this step have been sent.
        """
        if not isinstance(loss_sum, torch.Tensor) or loss_sum.dim():
            raise ConfigError(
                f"backward: the loss must be the sum over this rank's samples, a tensor of shape "
                f"[], got {describe(loss_sum)}. Use losses.sum()"
            )
        if not loss_sum.requires_grad:
            raise ConfigError(
                "backward: the loss has no gradient. Compute it from what trainer.forward returns, "
                "without detach(), item() or torch.no_grad()"
            )
        if isinstance(weight, (int, float)) and weight < 0:
            raise ConfigError(
                f"backward: the weight must not be negative, got {weight}. It is what the sum is "
                "divided by, for example the number of samples"
            )
        if self._has_sent:
            raise ConfigError(
                "backward: was called twice since the last update, and the first call has sent "
                "the gradients to the other ranks. Put all terms of a loss into one call, "
                "backward(first_sum + second_sum, weight); or all parts of a batch but the last "
                "into `with trainer.accumulating():`"
            )
        if not self.is_begun:
            raise ConfigError("backward: call trainer.forward first, which begins a step")
        self._require_not_frozen("backward")
        if not self._has_gradients:
            self._require_no_gradients("backward")
        self._has_gradients = True
        scale = self.strategy.loss_scale
        scaled_sum = loss_sum if scale is None else scale.scaled(loss_sum)
        with self.strategy.pass_context(None, True), surroundings(self.strategy, None, 1):
            scaled_sum.backward()
        parts = [loss_sum.detach(), torch.as_tensor(weight, device=loss_sum.device).detach()]
        self._sums += torch.stack([part.to(self._sums) for part in parts])
        self._has_sent = not self._accumulates

    def _require_not_frozen(self, method: str) -> None:
        if self.is_frozen:
            raise ConfigError(
                f"{method}: is called within `with trainer.frozen():` of the same trainer, in "
                "which its model gets no gradients. Call the methods of the other trainer there"
            )

    @contextmanager
    def accumulating(self) -> Generator[None]:
        """Keep the gradients of the body, a forward and a backward pass, on this rank."""
        if self._has_sent:
            raise ConfigError(
                "accumulating: the gradients of this step have been sent to the other ranks. Put "
                "all parts of a batch but the last into it"
            )
        self._accumulates = True
        try:
            with self.strategy.no_sync():
                yield
        finally:
            self._accumulates = False

    @contextmanager
    def frozen(self) -> Generator[None]:
        """Let gradients pass through the model in the body without changing those of its own.

        Raises:
            ConfigError: a step of the model is under way, or it is frozen already.
        """
        self.require_ended("frozen")
        self._require_not_frozen("frozen")
        self.is_frozen = True
        try:
            with without_gradients(self.strategy):
                yield
        finally:
            self.is_frozen = False

    def update(self) -> torch.Tensor:
        """Update the weights, and return the mean loss of the GLOBAL batch, [].

        Raises:
            ConfigError: there is no gradient, or the last part is missing.
        """
        if not self.is_begun:
            raise ConfigError("update: there was no backward pass since the last update")
        if not self._has_sent:
            raise ConfigError(
                "update: the gradients have not been sent to the other ranks. Call backward for "
                "the last part of a batch outside of `with trainer.accumulating():`"
            )
        self._require_not_frozen("update")
        strategy = self.strategy
        strategy.reduce_gradients()
        loss, weight = total(strategy, self._sums)
        strategy.scale_gradients(torch.where(weight == 0, 0, 1 / weight))
        if strategy.loss_scale is not None:
            strategy.loss_scale.unscale(gradients_of(strategy.module.parameters()))
        strategy.call_parameter_hooks()
        self.step.compute(None)
        self.step.advance()
        self.step.seed_alike()
        self.is_begun = False
        self._has_sent = False
        self._has_gradients = False
        self._passes = 0
        return torch.where(weight == 0, 0, loss / weight)


def describe(value: Any) -> str:
    """Return what a user has passed in place of a loss, for a message."""
    if isinstance(value, torch.Tensor):
        return f"the shape {list(value.shape)}"
    return f"{value!r}, a {type(value).__name__}"
