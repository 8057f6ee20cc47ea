"""The checks of a divided batch before the ranks connect: of the loss, and of the model."""

from functools import partial

from torch import nn

from ddp_lab.data.dataset import Dataset
from ddp_lab.data.loader import as_numbers
from ddp_lab.data.trees import apply, stack
from ddp_lab.models.trial import random_like
from ddp_lab.tasks.base import Task
from ddp_lab.tasks.made_up_batches import SAMPLES
from ddp_lab.training.divided_loss import Division, Samples, check_loss, outputs_for
from ddp_lab.training.divided_model import describe_division


def check_divided_loss(
    over_batch: bool, division: Division, dataset: Dataset, model: nn.Module, task: Task, key: str
) -> list[str]:
    """Check that the run does not divide a loss over the batch; return notes for the log.

    loss_over_batch=true allows it.

    Args:
        over_batch: whether loss_over_batch=true allows it.
        division: of the global batch.
        dataset: of which some targets are read if the loss is tried.
        model: the complete model.
        task: with the loss, on the CPU.
        key: key and value that chose the loss, for the message.

    Raises:
        ConfigError: the loss is over the batch, and the strategy, accumulation or micro-batches
            divide the batch.
    """
    if over_batch:
        note = division.describe()
        return [note] if note else []
    check_loss(division, task, key, partial(samples_of, dataset, model))
    return []


def describe_divided_model(
    division: Division, dataset: Dataset, model: nn.Module, task: Task
) -> list[str]:
    """Return notes for the log about what the model computes differently of parts of a batch.

    Args:
        division: of the global batch.
        dataset: of which two samples are read if the model is tried.
        model: the complete model.
        task: with the loss, on the CPU.
    """
    return describe_division(division, model, task, partial(two_samples, dataset))


def two_samples(dataset: Dataset) -> Samples:
    """Return the first sample twice, with random numbers for fractions, and targets of zeros."""
    from ddp_lab.data.collated import Collated

    train = dataset.train
    if isinstance(train, Collated):
        inputs, targets = train.batch(0, range(2))
        return apply(as_numbers, inputs), apply(as_numbers, targets)
    _, targets = train.example(2)
    return random_like(train.first_inputs(2)), targets


def samples_of(dataset: Dataset, model: nn.Module) -> Samples | None:
    """Return outputs of the model for random inputs, and targets of the first training samples."""
    from ddp_lab.data.collated import Collated

    train = dataset.train
    if isinstance(train, Collated):  # whose samples alone may have other shapes than in a batch
        inputs, targets = train.batch(0, range(min(SAMPLES, train.size)))
        return outputs_for(model, apply(as_numbers, inputs), apply(as_numbers, targets))
    inputs, _ = train.example(2)
    targets = [train.sample(0, index)[1] for index in range(min(SAMPLES, train.size))]
    return outputs_for(model, random_like(inputs), apply(as_numbers, stack(targets)))
