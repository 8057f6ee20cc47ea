"""A step of a user's own: the loop calls the model and the backward pass, in parts if it wants.

    outputs = trainer.forward(inputs)          the model, as the strategy calls it
    trainer.backward(loss_sum, weight)         adds gradients of a sum; the last part sends them
    trainer.update()                           divides by all weights, clips, optimizer, schedule

What is divided by is known only at the end: the sum of the weights over all parts and ranks. The
mean of the means of parts or ranks would be another value.
"""

import itertools
from collections.abc import Generator, Hashable
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp_lab.config.errors import ConfigError, TrainingError
from ddp_lab.data.seeds import seed_of
from ddp_lab.data.trees import Tree
from ddp_lab.models.outputs import map_outputs
from ddp_lab.strategies.base import Strategy, gradients_of, total
from ddp_lab.strategies.ddp import DDP, Passes
from ddp_lab.strategies.dtensor import local
from ddp_lab.strategies.frozen import without_gradients
from ddp_lab.strategies.micro_batches import surroundings
from ddp_lab.tasks.base import sum_dtype
from ddp_lab.training.step import Step

T = TypeVar("T")

WAY_OUT = (
    "Use trainer.step with a loss function, or strategy=single, scratch, ddp or fsdp, which call "
    "the complete model"
)


class OwnStep:
    """The parts of the step that a loop computes by itself.

    Args:
        step: of the trainer.
        batch_size: samples in the GLOBAL batch.
        number: of the trainer in its Lab.

    Attributes:
        is_begun: whether `forward` was called with gradients since the last update.
        is_frozen: whether gradients pass through the model, which takes no step then.
    """

    def __init__(self, step: Step, batch_size: int, number: int):
        self.step = step
        self.number = number
        self.strategy = step.strategy
        self.batch_size = batch_size
        self.is_begun = False
        self._accumulates = False
        self._has_sent = False  # the backward pass that sends the gradients is done
        self.is_frozen = False
        self._sums = torch.zeros(0)  # [loss_sum, weight] of this rank's parts
        self._has_gradients = False  # `backward` was called in this step
        # a sample of the inputs of each form, with which the rank is padded when it has none
        self._rows: dict[Hashable, list[torch.Tensor]] = {}
        self._passes = 0  # forward passes of this step
        # the step for which the random numbers of a name were drawn last
        self._drawn: dict[str, int] = {}

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
        tensors = tensors_of((arguments, keywords))
        has_samples = all(len(tensor) for tensor in tensors if tensor.dim())
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
        form = form_of(tensors)
        if has_samples and form not in self._rows:
            self._rows[form] = [row_of(tensor) for tensor in tensors]
        row = self._rows.get(form) or tensors_of(spare)
        inputs = placed((arguments, keywords), row, strategy.device)
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
            strategy.loss_scale.unscale(map(local, gradients_of(strategy.module.parameters())))
        strategy.call_parameter_hooks()
        self.step.compute(None)
        self.step.advance()
        self.step.seed_alike()
        self.is_begun = False
        self._has_sent = False
        self._has_gradients = False
        self._passes = 0
        return torch.where(weight == 0, 0, loss / weight)

    def randn(self, shape: tuple[int, ...], name: str) -> torch.Tensor:
        """Return rows of numbers that are drawn for the GLOBAL batch.

        Args:
            shape: [b, ...] of this rank.
            name: of what is drawn, once in a step.

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
        step = self.step.scheduler.last_epoch
        if self._drawn.get(name) == step:
            raise ConfigError(
                f"randn: name={name} was drawn in this step before, and would be the same numbers. "
                "Use another name"
            )
        self._drawn[name] = step
        seed = self.step.options.seed
        key = seed_of(f"randn {name}", seed=seed, trainer=self.number, step=step)
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


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers, in their order."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def form_of(tensors: list[torch.Tensor]) -> Hashable:
    """Return what the rows of tensors have in common with other ones: shapes and dtypes."""
    return tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)


def row_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the first row of a tensor; of a scalar the scalar."""
    return (tensor[:1] if tensor.dim() else tensor).detach().clone()


def placed(inputs: T, rows: list[torch.Tensor], device: torch.device) -> T:
    """Return inputs on a device; those of a rank that has no sample with one of padding.

    Args:
        inputs: arguments and keywords of the model.
        rows: a sample, used if it has the form of `inputs`: of zeros, as of a mask of nothing, a
            model may make NaN.
        device: of the rank.
    """
    fits = form_of(rows) == form_of(tensors_of(inputs))
    padding = iter(rows if fits else itertools.repeat(None))

    def place(tensor: torch.Tensor) -> torch.Tensor:
        row = next(padding)
        tensor = tensor.to(device)
        if not tensor.dim() or len(tensor):
            return tensor
        if row is None:
            row = tensor.new_zeros(1, *tensor.shape[1:])
        # concatenated, because gradients of other models may pass through the empty tensor
        return torch.cat([tensor, row.to(device)])

    return tree_map_only(torch.Tensor, place, inputs)


def without_rows(output: torch.Tensor) -> torch.Tensor:
    """Return an output of padding alone without its row.

    Raises:
        ConfigError: it has no rows.
    """
    if not output.dim():
        raise ConfigError(
            "forward: a rank that has no sample got an output of shape [], from which padding "
            "cannot be left out. Let the model return outputs with a row for each sample"
        )
    return output[:0]


def describe(value: Any) -> str:
    """Return what a user has passed in place of a loss, for a message."""
    if isinstance(value, torch.Tensor):
        return f"the shape {list(value.shape)}"
    return f"{value!r}, a {type(value).__name__}"
