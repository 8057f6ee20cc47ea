"""The numbers that follow from the config, the number of replicas and the size of the dataset."""

import math
from dataclasses import dataclass
from typing import Literal

from ddp_lab.config.errors import ConfigError
from ddp_lab.training.progress import Progress


@dataclass(frozen=True)
class Plan:
    """Batch sizes in samples, `samples_at_once` of a rank's largest piece, `lr` after scaling."""

    world_size: int
    replicas: int
    global_batch_size: int
    steps_per_epoch: int
    samples_at_once: int
    lr: float

    @classmethod
    def make(
        cls,
        *,
        world_size: int,
        replicas: int,
        train_size: int,
        batch_size: int,
        scaling: Literal["strong", "weak"],
        accumulate: int,
        lr: float,
        lr_scaling: Literal["none", "linear", "sqrt"],
        lr_base_batch_size: int,
    ) -> "Plan":
        """Works out a run's numbers; the arguments in samples.

        With scaling=strong, `batch_size` is the global batch, however many replicas share it; with weak it is each replica's.
        lr_scaling multiplies the learning rate by k = global batch / lr_base_batch_size ("linear", Goyal et al. 2017,
        arXiv:1706.02677) or by its square root ("sqrt", Krizhevsky 2014, arXiv:1404.5997).

        Raises:
            ConfigError: the batch does not divide by the replicas, or is smaller.
        """
        batch_size *= replicas if scaling == "weak" else 1
        if batch_size % replicas:
            lower = batch_size // replicas * replicas
            nearest = " or ".join(str(size) for size in (lower, lower + replicas) if size)
            raise ConfigError(
                f"batch_size={batch_size}: is the global batch and must divide by the {replicas} replicas that share it; "
                f"use {nearest}, or scaling=weak to give every replica {batch_size}"
            )
        factor = batch_size / lr_base_batch_size
        lr *= {"none": 1, "linear": factor, "sqrt": math.sqrt(factor)}[lr_scaling]
        at_once = math.ceil(batch_size / replicas / accumulate)
        return cls(world_size, replicas, batch_size, math.ceil(train_size / batch_size), at_once, lr)

    def steps_before(self, progress: Progress) -> int:
        """How far the learning-rate schedule is there: not the steps taken, where earlier launches had other batches."""
        return (progress.epoch - 1) * self.steps_per_epoch + math.ceil(progress.samples / self.global_batch_size)

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        batch = f"global batch {self.global_batch_size} = {self.replicas} x {self.global_batch_size // self.replicas}"
        return f"{ranks}, {batch}, {self.steps_per_epoch} steps an epoch, lr {self.lr:g}"
