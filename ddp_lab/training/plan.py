"""The batch sizes, steps and learning rate of a run, and its end.

They are computed from the config, the replicas and the dataset.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.config.types import ENDLESS, Every
from ddp_lab.training.progress import Criterion, Progress


class StepLimit(NamedTuple):
    """A number of optimizer steps after which a run ends, counted from its beginning.

    Attributes:
        key: of the config.
        value: of this key.
        steps: the number.
        of_samples: whether it follows from a number of samples and the present batch size.
    """

    key: str
    value: int
    steps: int
    of_samples: bool = False


def step_limits(
    max_steps: int | None, max_tokens: int | None, context: int | None, sizes: "TrainSizes"
) -> tuple[StepLimit, ...]:
    """Return the limits of a run that are a number of steps.

    Args:
        max_steps, max_tokens: the keys of the config.
        context: tokens of a sample; None: the samples are no tokens.
        sizes: of the run.

    Raises:
        ConfigError: max_tokens is set for samples that are no tokens.
    """
    limits: list[StepLimit] = []
    if max_steps is not None:
        limits.append(StepLimit("max_steps", max_steps, max_steps))
    if max_tokens is not None:
        if context is None:
            raise ConfigError(
                f"max_tokens={max_tokens}: the samples of this dataset are no tokens. Use "
                "max_steps, or task=tokens with a dataset of tokens"
            )
        samples = math.ceil(max_tokens / context)
        limits.append(StepLimit("max_tokens", max_tokens, sizes.steps_for(samples), True))
    return tuple(limits)


@dataclass(frozen=True)
class FitSettings:
    """When training ends, and when the test set is evaluated.

    Attributes:
        epochs: number of the last epoch; None: other limits end the run.
        patience: stop early after this many epochs in a row without a better `criterion`; None:
            never.
        evaluate_test: after every epoch, or after the last one only.
        criterion: a metric of the validation set.
        log_every: when the metrics of steps are recorded.
        full_rate: samples per second at which the devices compute with the FLOP/s of their data
            sheet; None: unknown.
        limits: numbers of steps of which the first that is reached ends the run, too.
        evaluate_every: evaluate also after every N steps within an epoch; None: never.
        max_minutes: of training, without evaluations, after which the run ends; None: no limit.
    """

    epochs: int | None
    patience: int | None = None
    evaluate_test: Literal["every_epoch", "end"] = "every_epoch"
    criterion: Criterion = "val_loss"
    log_every: Every = field(default_factory=Every)
    full_rate: float | None = None
    limits: tuple[StepLimit, ...] = ()
    max_minutes: float | None = None
    evaluate_every: int | None = None

    @property
    def last_step(self) -> int | None:
        """The number of the last step, counted from 1; None: no number of steps ends the run."""
        return min((limit.steps for limit in self.limits), default=None)

    def continued(self, progress: Progress, steps_before: int) -> "FitSettings":
        """Return the settings of a run that continues at a position.

        Limits that follow from a number of samples count steps of the present batch size, but those
        before the position may have had another one.

        Args:
            progress: the position.
            steps_before: steps before it, counted with the present batch size.
        """
        more = progress.step - steps_before
        limits = [
            limit._replace(steps=limit.steps + more) if limit.of_samples else limit
            for limit in self.limits
        ]
        return replace(self, limits=tuple(limits))

    def steps_left(self, progress: Progress, steps_before: int, per_epoch: int) -> float:
        """Return how many steps a run takes before its end, as far as that is known.

        Args:
            progress: the position of the run.
            steps_before: steps before it, counted with the present batch size.
            per_epoch: steps of an epoch.

        Returns:
            inf, if only the time limits the run.
        """
        left = math.inf
        if self.epochs is not None:
            left = self.epochs * per_epoch - steps_before
        if self.last_step is not None:
            left = min(left, self.last_step - progress.step)
        return left

    def seconds_left(self, progress: Progress) -> float:
        """Return how many seconds of training max_minutes leave; inf without this limit."""
        if self.max_minutes is None:
            return math.inf
        return 60 * self.max_minutes - progress.seconds_trained

    def is_stalled(self, progress: Progress) -> bool:
        """Return whether training stops early."""
        return self.patience is not None and progress.stalled(self.criterion) >= self.patience

    def is_out_of_time(self, position: Progress) -> bool:
        """Return whether the ranks have agreed that `max_minutes` have passed."""
        return self.max_minutes is not None and position.minutes_passed >= self.max_minutes


@dataclass(frozen=True)
class TrainSizes:
    """The batch sizes, steps and learning rate of a run.

    Attributes:
        world_size: number of ranks.
        replicas: number of model copies that share a global batch.
        global_batch_size: samples of one optimizer step, over all replicas.
        steps_per_epoch: optimizer steps, with the partial last batch.
        samples_at_once: samples of a full local batch, or of one micro-batch with gradient
            accumulation.
        lr: learning rate after scaling.
        train_size: number of training samples; ENDLESS of a stream, of which the run is one epoch.
    """

    world_size: int
    replicas: int
    global_batch_size: int
    steps_per_epoch: int
    samples_at_once: int
    lr: float
    train_size: int

    @classmethod
    def make(
        cls, keys: Mapping[str, Any], lr: float, world_size: int, replicas: int, train_size: int
    ) -> "TrainSizes":
        """Compute the sizes of a run.

        Args:
            keys: the config keys batch_size, scaling, accumulate, lr_scaling and
                lr_base_batch_size, with their values. lr_scaling=linear multiplies the learning
                rate by k = global batch size / lr_base_batch_size (Goyal et al. 2017,
                arXiv:1706.02677), sqrt by the square root of k (Krizhevsky 2014, arXiv:1404.5997).
            lr: learning rate before scaling.
            world_size: number of ranks.
            replicas: number of model copies.
            train_size: number of training samples.

        Raises:
            ConfigError: the global batch is not divisible by the number of replicas.
        """
        batch_size = keys["batch_size"]
        scaling = keys["scaling"]
        if scaling == "weak":
            batch_size *= replicas
        if batch_size % replicas:
            from ddp_lab.config.worlds import require_replicas

            require_replicas(batch_size, replicas)
        factor = batch_size / keys["lr_base_batch_size"]
        lr *= {"none": 1, "linear": factor, "sqrt": math.sqrt(factor)}[keys["lr_scaling"]]
        at_once = math.ceil(batch_size / replicas / keys["accumulate"])
        return cls(
            world_size=world_size,
            replicas=replicas,
            global_batch_size=batch_size,
            steps_per_epoch=math.ceil(train_size / batch_size),
            samples_at_once=at_once,
            lr=lr,
            train_size=train_size,
        )

    @property
    def is_endless(self) -> bool:
        """Whether the training set is a stream."""
        return self.train_size == ENDLESS

    def steps_before(self, progress: Progress) -> int:
        """Return the number of learning-rate schedule steps before `progress`.

        It differs from `progress.step`, the number of optimizer steps taken, if an earlier launch
        had another batch size.
        """
        return (progress.epoch - 1) * self.steps_per_epoch + math.ceil(
            progress.samples / self.global_batch_size
        )

    def steps_for(self, samples: int) -> int:
        """Return how many steps train on at least so many samples, with epochs' partial batches."""
        if self.is_endless:
            return -(-samples // self.global_batch_size)
        epochs, rest = divmod(samples, self.train_size)
        return epochs * self.steps_per_epoch + math.ceil(rest / self.global_batch_size)

    def warning(self) -> str | None:
        """Return a warning about a global batch that the training set cannot fill, or None."""
        if self.global_batch_size <= self.train_size:
            return None
        return (
            f"the global batch of {count(self.global_batch_size, 'sample')} is larger than the "
            f"training set: every epoch is a single step on a partial batch of {self.train_size} "
            f"(lr_scaling counts {self.global_batch_size}, and mixup and cutmix change full "
            "batches only). Use a smaller batch_size"
        )

    def __str__(self) -> str:
        ranks = count(self.world_size, "rank")
        local = self.global_batch_size // self.replicas
        parts, rest = divmod(local, self.samples_at_once)
        at_once = f"{parts} x {self.samples_at_once}" if parts > 1 else str(self.samples_at_once)
        local_text = f"({at_once} + {rest})" if rest else at_once
        batch = f"global batch {self.global_batch_size} = {self.replicas} x {local_text}"
        steps = "a stream" if self.is_endless else f"{count(self.steps_per_epoch, 'step')} an epoch"
        return f"{ranks}, {batch}, {steps}, lr {self.lr:g}"
