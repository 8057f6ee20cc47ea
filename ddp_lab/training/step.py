"""One training step as a callable."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.utils import clip_grads_with_norm_
from torch.optim.lr_scheduler import LambdaLR

from ddp_lab.data.batch import Batch
from ddp_lab.data.loader import Loader
from ddp_lab.data.seeds import seed_of
from ddp_lab.strategies.base import Strategy, gradients_of
from ddp_lab.strategies.dtensor import local
from ddp_lab.training.metrics import RunningSums
from ddp_lab.training.optimizer import by_mesh, has_shards, step_of

if TYPE_CHECKING:
    from ddp_lab.data.augment import Mix
    from ddp_lab.models.drop_path import DropPath
    from ddp_lab.training.ema import EMA
    from ddp_lab.training.two_modes import EvaluationWeights

Buffers = Mapping[str, torch.Tensor | None]  # as of `Strategy.buffers`


class TrainStep(Protocol):
    """The interface of a training step, that of `Step` and `GraphStep`."""

    def batches(self, loader: Loader) -> Iterable[Any]:
        """Return the argument of `__call__` for each remaining step of the epoch, in order."""
        ...

    def gather(self, batch: Any) -> Batch:
        """Return the batch for an element of `batches`, which `__call__` then takes instead."""
        ...

    def __call__(self, batch: Any) -> None:
        """Take one step, without waiting for the device."""


@dataclass(frozen=True)
class StepOptions:
    """What a step does besides forward, backward and update.

    Attributes:
        accumulate: number of gradient-accumulation steps.
        max_grad_norm: largest L2 norm of the complete model's gradient; larger gradients are scaled
            down. None: no clipping.
        skip_not_finite: replace a gradient that is not finite by zeros.
        mix: mixes the samples of each batch; None: they stay as they are.
        seed: of the run.
    """

    accumulate: int = 1
    max_grad_norm: float | None = None
    skip_not_finite: bool = False
    mix: "Mix | None" = None
    seed: int = 0


class Step:
    """A training step: gradients of one global batch, one optimizer step, one step of the schedule.

    Args:
        strategy: computes the gradients; after `Strategy.setup`.
        optimizer: of the strategy's parameters.
        scheduler: of the learning rate.
        options: what else it does.
        ema: weights of evaluations, updated after each step; None: they are those that train.

    Attributes:
        running_sums: sums of the losses, each computed before the optimizer's step.
        lr: learning rate of the last step.
        sums: the last step's [loss_sum, *task.train_metrics, weight] of this rank, which the next
            step may overwrite.
    """

    sums: torch.Tensor

    def __init__(
        self,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
        options: StepOptions,
        ema: "EMA | EvaluationWeights | None",
    ):
        self.strategy = strategy
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.options = options
        self.ema = ema
        self.mix = options.mix and options.mix.to(strategy.device)
        self.drop_paths: list[DropPath] = []
        if any(getattr(module, "drops_by_step", False) for module in strategy.module.modules()):
            from ddp_lab.models.drop_path import drop_paths_of

            self.drop_paths = drop_paths_of(strategy.module.modules())

        self.running_sums = RunningSums(
            strategy.task,
            strategy.device,
            options.skip_not_finite,
            has_norm=options.skip_not_finite
            or options.max_grad_norm is not None
            or strategy.loss_scale is not None,
        )
        self._optimize = step_of(optimizer)
        if strategy.loss_scale is not None:
            from ddp_lab.training.skipped_step import SkippedStep

            runtime = strategy.runtime
            self._optimize = SkippedStep(
                optimizer, self._optimize, strategy.loss_scale, runtime.is_planned, runtime.is_main
            )
        in_optimizer = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        self._known = {id(parameter) for parameter in strategy.module.parameters()}
        self._num_groups = len(optimizer.param_groups)
        # frozen ones, too, which a loop may unfreeze
        self._left_out = [
            parameter
            for parameter in strategy.module.parameters()
            if id(parameter) not in in_optimizer
        ]
        self.lr = 0.0

    def compile(self, compile_fn: partial[Any]) -> None:
        """Compile the running sums, and the optimizer's step but the first.

        The former with `compile_fn`, the latter with torch.compile's defaults.

        An optimizer with a fused kernel, with shards or of steps that may be skipped is not
        compiled. The learning rate of others must be a tensor: a number would be compiled again
        whenever it changes.
        """
        fused = any(group.get("fused") for group in self.optimizer.param_groups)
        may_skip = self.strategy.loss_scale is not None
        if not fused and not may_skip and not has_shards(self.optimizer):
            # The first step creates the optimizer's state: compiled, it would be compiled a second
            # time for the next ones.
            steps = chain([self.optimizer.step], repeat(torch.compile(self.optimizer.step)))
            self._optimize = lambda: next(steps)()
        self.running_sums.compile(compile_fn)

    def batches(self, loader: Loader) -> Iterable[Batch]:
        """Return the argument of `__call__` for each remaining step of the epoch, in order."""
        return loader

    def gather(self, batch: Batch) -> Batch:
        """Return the batch for an element of `batches`. Here the element already is the batch."""
        return batch

    def __call__(self, batch: Batch) -> None:
        """Take one step, without waiting for the device."""
        self.prepare()
        self.compute(batch)
        self.advance()

    def prepare(self) -> None:
        """Do the work on the host that a step needs.

        Draw how its batch is mixed, and seed what it draws, such as dropout masks.

        So a resumed run draws what an uninterrupted one does. The ranks of a tensor-parallel layer
        draw the same; replicas, and the stages of a pipeline, do not.
        """
        self.adopt_added_groups()
        step = self.scheduler.last_epoch  # the number of the step, also after a resume
        strategy = self.strategy
        place = strategy.dp_rank + strategy.dp_size * strategy.pp_rank
        self.seed(seed_of("masks", seed=self.options.seed, step=step, replica=place))
        if self.mix is not None:
            self.mix.prepare(step)
        for branch in self.drop_paths:
            branch.prepare(self.options.seed, step)

    def adopt_added_groups(self) -> None:
        """Let the schedule have groups that were added to the optimizer since the last call.

        Raises:
            ConfigError: as `adopt_groups`.
        """
        if len(self.optimizer.param_groups) > self._num_groups:
            from ddp_lab.training.added_groups import adopt_groups

            adopt_groups(self.scheduler, self.strategy, self._known)
            self._num_groups = len(self.optimizer.param_groups)

    def seed_alike(self) -> None:
        """Seed what is drawn between the steps on all ranks alike.

        A model constructed there is then the same on each.
        """
        self.seed(seed_of("between", seed=self.options.seed, step=self.scheduler.last_epoch))

    def seed(self, key: int) -> None:
        """Seed what the device of this rank draws."""
        torch.default_generator.manual_seed(key)  # torch.manual_seed would take ten times as long
        device = self.strategy.device
        if device.type == "cuda":  # a CUDA graph reads the seed at every replay
            torch.cuda.default_generators[device.index].manual_seed(key)

    def mixed(self, batch: Batch) -> Batch:
        """Return the batch to train on."""
        return batch if self.mix is None else self.mix(batch)

    def compute(self, batch: Batch | None) -> None:
        """Queue the work of a step on the device. A CUDA graph captures this method.

        Args:
            batch: of the step; None: a loop of the user has computed the gradients, and the running
                sums do not count its losses.
        """
        skip = self.options.skip_not_finite
        scale = self.strategy.loss_scale
        largest = self.options.max_grad_norm
        buffers: Buffers = {}
        if skip or scale is not None:
            buffers = {
                name: None if buffer is None else buffer.clone()
                for name, buffer in self.strategy.buffers().items()
            }
        if batch is not None:
            self.sums = self.backward(batch)
        if self.running_sums.norm is not None:
            norm = self.strategy.gradient_norm()
            self.running_sums.norm.copy_(norm)
            if scale is not None:
                self._restore_buffers_unless(scale.check(norm), buffers)
            elif skip:
                self._drop_unless(norm.isfinite(), buffers)
            if largest is not None:
                finite = norm.nan_to_num()
                for alike in by_mesh(self.strategy.module.parameters()):
                    clip_grads_with_norm_(alike, largest, finite)

        self._optimize()
        if self.ema is not None:
            self.ema.update()
        if scale is not None:
            scale.update()
        if batch is not None:
            self.running_sums.add(self.sums)
        self.zero_grad()

    def backward(self, batch: Batch) -> torch.Tensor:
        """Compute the gradients of the GLOBAL batch, before they are clipped; return the sums."""
        return self.strategy.forward_backward(*self.mixed(batch), self.options.accumulate)

    def zero_grad(self) -> None:
        """Remove the gradients of all parameters, also of those that the optimizer leaves out.

        They would be added to those of the next step, and count in its norm.
        """
        self.optimizer.zero_grad()
        for parameter in self._left_out:
            parameter.grad = None

    def advance(self) -> None:
        """Do the work of a step on the host: record its learning rate, set that of the next one."""
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step()

    def _drop_unless(self, finite: torch.Tensor, buffers: Buffers) -> None:
        """Set gradients to zero and restore buffers, unless `finite`.

        `finite` is the same on all ranks, because it comes from the gradient norm of the complete
        model. This does not wait for the device.

        Args:
            finite: bool, [].
            buffers: copies from before the batch, as of `Strategy.buffers`.
        """
        for gradient in map(local, gradients_of(self.strategy.module.parameters())):
            gradient.copy_(torch.where(finite.to(gradient.device, non_blocking=True), gradient, 0))
        self._restore_buffers_unless(finite, buffers)

    def _restore_buffers_unless(self, finite: torch.Tensor, buffers: Buffers) -> None:
        """Restore buffers, such as BatchNorm's statistics, unless `finite`. Arguments as above.

        One that has grown in the step, such as a queue of a loss, makes the host wait.
        """
        for name, buffer in self.strategy.buffers().items():
            if buffer is None or name not in buffers:
                continue
            before = buffers[name]
            if before is not None and before.shape == buffer.shape:
                is_kept = finite.to(buffer.device, non_blocking=True)
                buffer.copy_(torch.where(is_kept, buffer, before))
            elif not finite:
                from ddp_lab.models.buffers import replace_buffer_of

                replace_buffer_of(self.strategy.roots, name, before)
