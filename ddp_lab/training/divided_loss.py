"""The check against dividing a loss over the batch, which would silently be another loss."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.data.trees import Tree
from ddp_lab.strategies.base import Strategy
from ddp_lab.tasks.base import Task
from ddp_lab.tasks.over_batch import describe_coupling, is_own, outputs_of

Samples = tuple[Any, Tree]  # outputs and targets


class Division(NamedTuple):
    """How a global batch is divided into several calls of the loss.

    nn.DataParallel does not divide it: it gathers the outputs of all replicas before the loss.

    Attributes:
        strategy: has local batches and micro-batches.
        batch_size: samples of the GLOBAL batch.
        accumulate: number of gradient-accumulation steps.
    """

    strategy: Strategy
    batch_size: int
    accumulate: int

    @property
    def causes(self) -> list[str]:
        """What divides the batch for the loss; empty if nothing does."""
        return self._causes(self.strategy.dp_size)

    @property
    def causes_for_model(self) -> list[str]:
        """What divides the batch for the model, as nn.DataParallel does, too."""
        return self._causes(self.strategy.replicas)

    @property
    def causes_for_batch_norm(self) -> list[str]:
        """What divides the batch for BatchNorm."""
        return self._causes(self._replicas_for_batch_norm)

    @property
    def samples(self) -> int:
        """How many samples of a full global batch a call of the loss gets at most."""
        return self._samples(self.strategy.dp_size)

    @property
    def samples_for_batch_norm(self) -> int:
        """How many samples of a full global batch BatchNorm normalises together at most."""
        return self._samples(self._replicas_for_batch_norm)

    @property
    def _replicas_for_batch_norm(self) -> int:
        return self.strategy.replicas if self.strategy.batch_norm == "local" else 1

    def _causes(self, replicas: int) -> list[str]:
        strategy = self.strategy
        counts = {
            f"strategy={strategy.name} on {replicas} replicas": replicas,
            f"accumulate={self.accumulate}": self.accumulate,
            f"strategy.num_microbatches={strategy.num_microbatches}": strategy.num_microbatches,
        }
        return [name for name, count in counts.items() if count > 1]

    def _samples(self, replicas: int) -> int:
        local_batch = self.batch_size / replicas
        return math.ceil(math.ceil(local_batch / self.accumulate) / self.strategy.num_microbatches)

    def describe(self) -> str | None:
        """Return a line for the log about loss_over_batch=true; None if it is not divided."""
        if not self.causes:
            return None
        return (
            f"loss_over_batch=true: the loss is computed over each local batch of {self.samples} "
            "samples"
        )


def check_loss(
    division: Division, task: Task, key: str, samples: Callable[[], Samples | None]
) -> bool:
    """Check that a loss which is divided is a sum over samples, as far as a trial finds it.

    Args:
        division: of the batch.
        task: with the loss.
        key: what chose the loss, for the message.
        samples: returns outputs and targets to try it with; None if there are none. It is called if
            the loss is tried.

    Returns:
        Whether it is checked; False if there were no samples.

    Raises:
        ConfigError: the loss is over the batch.
    """
    if not division.causes or is_own(task):
        return True
    outputs_and_targets = samples()
    if outputs_and_targets is None:
        return False

    outputs, targets = outputs_and_targets
    if not isinstance(outputs, torch.Tensor):
        from ddp_lab.tasks.nested import outputs_for as taken_by

        outputs = taken_by(task, outputs)
    from ddp_lab.tasks.loss_trial import trial_of_loss

    with trial_of_loss() as trial:
        how = describe_coupling(task, outputs, targets, division.batch_size)
    if trial.gathers:
        task.note_gathering()
        return True
    if how is not None:
        raise ConfigError(
            f"{key}: the loss is not a sum over samples: it {how}. {' and '.join(division.causes)} "
            f"would compute it over {count(division.samples, 'sample')} at a time, and not over "
            "the global "
            f"batch of {division.batch_size}. Use strategy=single with accumulate=1; or a loss "
            "that depends on one sample alone, or that calls ddp_lab.gather; or "
            "loss_over_batch=true, if it is meant to be computed over each part of the batch"
        )
    return True


def check_lab_loss(
    division: Division,
    model: nn.Module,
    task: Task,
    example: tuple[Tree, Tree] | None,
    over_batch: bool,
) -> str | None:
    """Check the loss of a trainer of a Lab: now if the example is complete, else in the first step.

    Args:
        division: of the batch.
        model: complete.
        task: with the loss, on the CPU.
        example: inputs and targets of complete samples; None: there are none.
        over_batch: whether a loss over the batch is allowed.

    Returns:
        A line for the log; None if there is nothing to say.

    Raises:
        ConfigError: the loss is over the batch.
    """
    if over_batch:
        task.require_first(partial(check_in_first_batch, division, task, is_allowed=True))
        return division.describe()
    if not check_loss(division, task, "loss", lambda: example and outputs_for(model, *example)):
        task.require_first(partial(check_in_first_batch, division, task))
    return None


def check_in_first_batch(
    division: Division, task: Task, outputs: Any, targets: Tree, is_allowed: bool = False
) -> None:
    """Check a loss with the outputs and targets of the first batch.

    Args:
        division: of the batch.
        task: with the loss.
        outputs, targets: of the first batch.
        is_allowed: whether a loss over each part of the batch is allowed.

    Raises:
        ConfigError: the loss is over the batch; or it gathers the batch, of which a rank has no
            sample.
    """
    try:
        check_loss(division, task, "loss", lambda: (outputs, targets))
    except ConfigError:
        if not is_allowed:
            raise
    if task.gathers:
        from ddp_lab.strategies.gathering import require_samples_everywhere

        require_samples_everywhere(division.strategy)


def outputs_for(model: nn.Module, inputs: Tree, targets: Tree) -> Samples | None:
    """Return the outputs of a model, as `outputs_of`, with the targets; None if the model fails."""
    outputs = outputs_of(model, inputs)
    return None if outputs is None else (outputs, targets)
