"""What ends a run by the config, and where its learning-rate schedule ends then."""

import math

from omegaconf import DictConfig

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.dataset import Dataset
from ddp_lab.training.plan import StepLimit, TrainSizes
from ddp_lab.training.schedule import Horizon


def step_limits(cfg: DictConfig, dataset: Dataset, sizes: TrainSizes) -> tuple[StepLimit, ...]:
    """Return the limits of the config that are a number of steps.

    Raises:
        ConfigError: max_tokens is set for samples that are no tokens.
    """
    limits: list[StepLimit] = []
    if cfg.get("max_steps") is not None:
        limits.append(StepLimit("max_steps", cfg.max_steps, cfg.max_steps))
    if cfg.get("max_tokens") is not None:
        shape = dataset.model_shape()
        if "context" not in shape:
            raise ConfigError(
                f"max_tokens={cfg.max_tokens}: the samples of this dataset are no tokens. Use "
                "max_steps, or task=tokens with a dataset of tokens"
            )
        samples = math.ceil(cfg.max_tokens / shape["context"])
        limits.append(StepLimit("max_tokens", cfg.max_tokens, steps_of(samples, sizes)))
    return tuple(limits)


def steps_of(samples: int, sizes: TrainSizes) -> int:
    """Return how many steps train on at least so many samples, with epochs' partial batches."""
    epochs, rest = divmod(samples, sizes.train_size)
    return epochs * sizes.steps_per_epoch + math.ceil(rest / sizes.global_batch_size)


def make_horizon(epochs: int | None, limits: tuple[StepLimit, ...], sizes: TrainSizes) -> Horizon:
    """Return where the schedule ends: at the first limit that is a number of steps, if any."""
    ends = [limit.steps for limit in limits]
    if epochs is not None:
        ends.append(epochs * sizes.steps_per_epoch)
    return Horizon(min(ends, default=None))


def warmup_steps(cfg: DictConfig, sizes: TrainSizes, horizon: Horizon) -> int:
    """Return the number of steps of the warm-up.

    Raises:
        ConfigError: warmup_steps is longer than the run.
    """
    steps = cfg.get("warmup_steps")
    if steps is None:
        return round(cfg.warmup_epochs * sizes.steps_per_epoch)
    if horizon.steps is not None and steps >= horizon.steps > 0:
        raise ConfigError(
            f"warmup_steps={steps}: must be less than the {horizon.steps:,} steps of the run"
        )
    return steps
