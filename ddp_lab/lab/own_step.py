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
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp_lab.config.errors import ConfigError, TrainingError
from ddp_lab.data.seeds import seed_of
from ddp_lab.models.outputs import map_outputs
from ddp_lab.strategies.base import Strategy, total
from ddp_lab.strategies.ddp import DDP, Passes
from ddp_lab.strategies.frozen import without_gradients
from ddp_lab.strategies.micro_batches import surroundings
from ddp_lab.training.step import Step

WAY_OUT = (
    "Use trainer.step with a loss function, or strategy=single, scratch, ddp or fsdp, which call "
    "the complete model"
)


class OwnStep:
    """The parts of the step that a loop computes by itself.

    Args:
        step: of the trainer.
        batch_size: samples in the GLOBAL batch.

    Attributes:
        is_begun: whether `forward` was called since the last update.
        is_frozen: whether gradients pass through the model, which takes no step then.
    """

    def __init__(self, step: Step, batch_size: int):
        self.step = step
        self.strategy = step.strategy
        self.batch_size = batch_size
        self.is_begun = False
        self._accumulates = False
        self._has_sent = False  # the backward pass that sends the gradients is done
        self.is_frozen = False
        self._sums = torch.zeros(0)  # [loss_sum, weight] of this rank's parts
        self._drawn: set[str] = set()  # names of the random numbers of this step

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

    def begin(self, global_size: int) -> None:
        """Begin a step, in training mode.

        Args:
            global_size: samples of the GLOBAL batch.
        """
        self.step.prepare()
        self.strategy.prepare_step()
        self.strategy.begin_batch(global_size)
        device = self.strategy.device
        self._sums = torch.zeros(2, dtype=torch.get_default_dtype(), device=device).double()
        self.is_begun = True

    def forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any], spare: int) -> Any:
        """Return the outputs of the model, with a gradient.

        Args:
            arguments, keywords: of the model, whose tensors are [b, ...].
            spare: number of samples with which a rank is padded that has none.
        """
        tensors = [leaf for leaf in tree_leaves((arguments, keywords)) if is_tensor(leaf)]
        has_samples = all(len(tensor) for tensor in tensors if tensor.dim())
        if self._accumulates:
            self.strategy.accumulate = 2  # of which `gather` must not compare the parts
        arguments, keywords = tree_map_only(
            torch.Tensor, partial(placed, self.strategy.device, spare), (arguments, keywords)
        )
        strategy = self.strategy
        inputs = arguments, keywords
        passing = strategy.pass_context(inputs, has_samples)
        with passing, surroundings(strategy, None, has_samples), strategy.autocast():
            outputs = self._module()(*arguments, **keywords)
        return outputs if has_samples else map_outputs(lambda tensor: tensor[:0], outputs)

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
        with self.strategy.pass_context(None, True), surroundings(self.strategy, None, 1):
            loss_sum.backward()
        parts = [loss_sum.detach(), torch.as_tensor(weight, device=loss_sum.device)]
        self._sums += torch.stack([part.to(self._sums) for part in parts])
        self._has_sent = not self._accumulates

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
        """Let gradients pass through the model in the body without changing those of its own."""
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
        strategy = self.strategy
        strategy.reduce_gradients()
        loss, weight = total(strategy, self._sums)
        strategy.scale_gradients(torch.where(weight == 0, 0, 1 / weight))
        strategy.call_parameter_hooks()
        self.step.compute(None)
        self.step.advance()
        self.step.seed_alike()
        self.is_begun = False
        self._has_sent = False
        self._drawn.clear()
        return torch.where(weight == 0, 0, loss / weight)

    def randn(self, shape: tuple[int, ...], name: str, seed: int, trainer: int) -> torch.Tensor:
        """Return rows of numbers that are drawn for the GLOBAL batch.

        Args:
            shape: [b, ...] of this rank.
            name: of what is drawn, once in a step.
            seed: of the run.
            trainer: its number in the Lab.

        Raises:
            ConfigError: there are more rows than samples, or the name was drawn before.
        """
        strategy = self.strategy
        most = self.batch_size // strategy.dp_size
        if not shape or not 0 <= shape[0] <= most:
            raise ConfigError(
                f"randn: got the shape {list(shape)}, expected [b, ...] with a row for each sample "
                f"of this rank, at most {most}"
            )
        if name in self._drawn:
            raise ConfigError(
                f"randn: name={name} was drawn in this step before, and would be the same numbers. "
                "Use another name"
            )
        self._drawn.add(name)
        step = self.step.scheduler.last_epoch
        key = seed_of(f"randn {name}", seed=seed, trainer=trainer, step=step)
        generator = torch.Generator().manual_seed(key)
        drawn = torch.randn(self.batch_size, *shape[1:], generator=generator)
        return drawn[strategy.dp_rank :: strategy.dp_size][: shape[0]].to(strategy.device)


class BareCalls:
    """Refuses calls of the model that the strategy does not see: a hook on the model.

    A wrapper such as DistributedDataParallel sums the gradients of its own calls only.

    Args:
        strategy: its name, for the message.
        passes: of the strategy that are under way.
    """

    def __init__(self, strategy: str, passes: Passes):
        self.strategy = strategy
        self.passes = passes

    def __deepcopy__(self, memo: object) -> "BareCalls":
        """Return a hook that allows all calls: a copy of the model belongs to the user."""
        return BareCalls(self.strategy, Passes(under_way=1))

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        """Raise a TrainingError if a loop calls the model, in training and with gradients."""
        if not self.passes.under_way and module.training and torch.is_grad_enabled():
            raise TrainingError(
                f"strategy={self.strategy}: the model was called directly in training, so its "
                "gradients would not be summed over the ranks. Use trainer.forward(inputs), then "
                "trainer.backward(loss_sum, weight) and trainer.update(); or trainer.step(inputs, "
                "targets); or torch.no_grad(), if no gradient is needed"
            )


def watch_bare_calls(strategy: Strategy) -> None:
    """Let a direct call of the model be refused, if the strategy has a wrapper that must be called.

    Args:
        strategy: after `setup`.
    """
    if isinstance(strategy, DDP):
        strategy.module.register_forward_pre_hook(BareCalls(strategy.name, strategy.passes))


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor."""
    return isinstance(value, torch.Tensor)


def placed(device: torch.device, spare: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on a device, with `spare` rows of zeros if it has none."""
    tensor = tensor.to(device)
    if tensor.dim() and not len(tensor):
        # concatenated, because gradients of other models may pass through the empty tensor
        return torch.cat([tensor, tensor.new_zeros(spare, *tensor.shape[1:])])
    return tensor


def describe(value: Any) -> str:
    """Return what a user has passed in place of a loss, for a message."""
    if isinstance(value, torch.Tensor):
        return f"the shape {list(value.shape)}"
    return f"{value!r}, a {type(value).__name__}"
