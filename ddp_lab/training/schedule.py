"""Learning-rate schedules: an optional linear warm-up, then a shape over the rest of the run.

A shape is a function of `progress`, the fraction of the steps after the warm-up, from 0 to below 1;
or of `epoch`, the epochs since the beginning of the run, with a fraction within an epoch.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LambdaLR

from ddp_lab.config.errors import ConfigError, count, describe_error
from ddp_lab.config.types import Fraction, Positive


def constant(progress: float) -> float:
    """Return the factor 1 at any progress."""
    return 1.0


def cosine(progress: float) -> float:
    """Return a factor that falls from 1 to 0 along half a cosine.

    Loshchilov and Hutter 2016, arXiv:1608.03983, one period.
    """
    return 0.5 * (1 + math.cos(math.pi * progress))


def multi_step(epoch: float, milestones: list[Positive], gamma: Positive) -> float:
    """Return a factor that starts at 1 and changes at milestones, as torch's MultiStepLR.

    Args:
        milestones: epochs from the beginning of the run after which the learning rate is multiplied
            by gamma.
        gamma: factor of the learning rate at each milestone.
    """
    return gamma ** sum(epoch >= milestone for milestone in milestones)


def trapezoid(progress: float, decay: Fraction = 0.2) -> float:
    """Return a factor that is 1, and falls to 0 on a straight line at the end.

    With a warm-up before it, this is the schedule "warm-up, stable, decay" (Hu et al. 2024,
    arXiv:2404.06395).

    Args:
        decay: fraction of the progress in which the factor falls.
    """
    return 1.0 if progress <= 1 - decay else (1 - progress) / decay


class ShapeByMetric:
    """A shape that depends on a metric of the validation set.

    Attributes:
        metric: its name, for example val_loss.
    """

    metric: str


def try_shape(shape: Callable[..., float], target: str, epochs: float) -> None:
    """Try a shape at the beginning, the middle and the end of the run.

    Args:
        shape: maps `progress` or `epoch` to a factor.
        target: its name in the config.
        epochs: epochs of the run.

    Raises:
        ConfigError: the shape fails, or does not return a number.
    """
    name, end = ("epoch", epochs) if by_epoch(shape) else ("progress", 1)
    for position in (0.0, end / 2, float(end)):
        try:
            float(shape(position))
        except Exception as error:
            raise ConfigError(
                f"scheduler._target_={target}: failed for {name}={position:g}: "
                f"{describe_error(error)}. It must return a number, the factor of optimizer.lr, "
                f"for each {name} from 0 to {end:g}"
            ) from None


def by_epoch(shape: Callable[..., float]) -> bool:
    """Return whether a shape is a function of the epoch, and not of the progress."""
    return "epoch" in inspect.signature(shape).parameters


@dataclass(eq=False)
class Horizon:
    """The end of a schedule: the first of the ends that limit the run.

    An end in optimizer steps (max_steps, max_minutes) counts those that were taken. One that
    follows from epochs or samples is given in steps of the present batch size, and so is the
    position of a schedule that it ends. The two differ after a resume with another batch size.

    Attributes:
        by_steps: number of steps, counted from the beginning of the run, after which max_steps ends
            the run. None: no such limit.
        by_samples: the same, in steps of the present batch size, because of a number of samples.
        warmup_steps: steps of the warm-up, which are the first of the schedule.
        counts_epochs: whether the shape is a function of the epoch.
        by_time: as `by_steps`, of max_minutes. None: no such limit, or it is not known yet.
        ahead: how many steps more, or fewer, the position has in steps of the present batch size
            than were taken.
    """

    by_steps: int | None = None
    by_samples: int | None = None
    warmup_steps: int = 0
    counts_epochs: bool = False
    by_time: int | None = None
    ahead: int = 0

    def continue_at(self, taken: int, of_batch_size: int) -> None:
        """Continue a run at a position.

        Args:
            taken: optimizer steps before it.
            of_batch_size: steps before it, if all had had the present batch size.
        """
        self.ahead = of_batch_size - taken

    @property
    def _in_steps(self) -> int | None:
        """The first of the ends in optimizer steps; None: there is none, or it is not known yet."""
        return min((end for end in (self.by_steps, self.by_time) if end is not None), default=None)

    @property
    def _ends_by_steps(self) -> bool:
        if self.by_samples is None:
            return True
        return self._in_steps is not None and self._in_steps <= self.by_samples - self.ahead

    @property
    def steps(self) -> int | None:
        """The end of the schedule, counted as `position`.

        None: it is not known yet, and the progress of the schedule stays at 0.
        """
        return self._in_steps if self._ends_by_steps else self.by_samples

    @property
    def last_step(self) -> int | None:
        """The end of the schedule in optimizer steps that will have been taken; None: not known."""
        steps = self.steps
        return steps if steps is None or self._ends_by_steps else steps - self.ahead

    def position(self, taken: int) -> int:
        """Return the number of steps of the schedule before a position of the run.

        Args:
            taken: optimizer steps before it.
        """
        return taken if self._ends_by_steps and not self.counts_epochs else taken + self.ahead

    def describe(self, taken: int) -> str | None:
        """Return a line about a schedule that resumes with another batch size, or None.

        Args:
            taken: optimizer steps before the position.
        """
        if not self.ahead:
            return None
        end = "" if self.steps is None else f" of {self.steps:,}"
        place = self.position(taken)
        kind = "optimizer steps" if place == taken else "steps of the present batch size"
        return (
            "the batch size has changed: the schedule of the learning rate goes on after "
            f"{place:,}{end} {kind}"
        )

    def check_warmup(self) -> None:
        """Check that the warm-up ends before the schedule.

        Raises:
            ConfigError: it does not.
        """
        if self.steps is not None and self.warmup_steps >= self.steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps}: must be less than the length of the run, "
                f"{count(self.steps, 'step')}"
            )

    def warning(self) -> str | None:
        """Return a warning about a warm-up that does not end before the schedule, or None."""
        if self.steps is None or not self.warmup_steps >= self.steps > 0:
            return None
        highest = self.steps / (self.warmup_steps + 1)
        return (
            f"the warm-up of {count(self.warmup_steps, 'step')} does not end in this run of "
            f"{count(self.steps, 'step')}, in which the learning rate rises to {highest:.0%} of "
            "optimizer.lr"
        )


def make_scheduler(
    optimizer: torch.optim.Optimizer,
    shape: Callable[..., float],
    horizon: Horizon,
    steps_per_epoch: int,
) -> LambdaLR:
    """Return a scheduler that multiplies the learning rate by a factor.

    In warm-up step s (from 0) the factor is (s + 1) / (warmup_steps + 1). After the warm-up it is
    that of the shape.

    Args:
        shape: maps `progress` or `epoch`, whichever it has a parameter for, to a factor.
        horizon: the end of the schedule, which may be set later, and of its warm-up.
        steps_per_epoch: optimizer steps of an epoch.
    """
    warmup_steps = horizon.warmup_steps
    counts_epochs = by_epoch(shape)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if counts_epochs:
            return shape(step / steps_per_epoch)
        end = horizon.steps
        if end is None:
            return shape(0.0)
        return shape(min(1.0, (step - warmup_steps) / max(1, end - warmup_steps)))

    return LambdaLR(optimizer, factor)
