"""The micro-batches of gradient accumulation, and those that contain padding.

Padding is at the end of a local batch, so that the last micro-batches may be nothing else. It does
not count in the loss. What else it would change is kept from it here:

| what padding would change | how it is kept from it |
|---|---|
| BatchNorm's statistics of the global batch | all but one sample are cut; that one does not count |
| which parameters a step uses | it is cut |
| outputs that are no tensor, which the loss cannot cut | it is cut from the inputs |
"""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from ddp_lab.data.trees import Tree, chunk, rows
from ddp_lab.strategies.batch_norm import padding_ignored
from ddp_lab.strategies.idle import uses_reported
from ddp_lab.strategies.nested import samples_in

if TYPE_CHECKING:
    from ddp_lab.strategies.base import Strategy


def divide(
    strategy: "Strategy", batch: tuple[Tree, Tree], num_valid: int, accumulate: int
) -> list[tuple[Tree, Tree, int]]:
    """Return the micro-batches of a local batch: inputs, targets, and samples without padding.

    There are as many on every rank.

    Args:
        strategy: what it does decides how much padding is cut.
        batch: inputs and targets, with padding at the end.
        num_valid: number of samples without padding.
        accumulate: number of micro-batches.
    """
    parts = chunk(batch, accumulate) if accumulate > 1 else [batch]
    micro_batches: list[tuple[Tree, Tree, int]] = []
    for part in parts:
        inputs, _ = part
        valid_here = min(num_valid, samples_in(strategy, inputs))
        num_valid -= valid_here
        num_rows = rows_to_compute(strategy, inputs, valid_here)
        if num_rows is not None:
            part = rows(part, slice(num_rows))
        micro_batches.append((*part, valid_here))
    return micro_batches


def rows_to_compute(strategy: "Strategy", inputs: Tree, num_valid: int) -> int | None:
    """Return with how many of its samples a micro-batch is computed; None: with all of them.

    Where there is nothing but padding, a sample of it is kept, because every rank must compute
    every micro-batch, and many models fail for none.
    """
    if strategy.find_unused_parameters:
        # A rank of shards must make the collectives of a pass; it lets a sample that does not count
        # use nothing.
        return max(num_valid, 1) if strategy.sharded else num_valid
    if (
        strategy.batch_norm == "sync"
        or strategy.cuts_padding
        or not isinstance(inputs, torch.Tensor)
    ):
        return max(num_valid, 1)
    return None


@contextmanager
def surroundings(strategy: "Strategy", inputs: Tree, num_valid: int) -> Generator[None]:
    """Keep a micro-batch of padding out of BatchNorm's statistics, and report unexpected uses.

    Args:
        strategy: computes the micro-batch in the body.
        inputs: of the micro-batch.
        num_valid: number of its samples without padding.

    Raises:
        TrainingError: the body uses a parameter that the trial of the model has not used.
    """
    # local statistics of a tensor's padding are those that one device would compute
    counts = num_valid > 0 or (
        strategy.batch_norm == "local"
        and isinstance(inputs, torch.Tensor)
        and not strategy.cuts_padding
    )
    uses = uses_reported(strategy) if strategy.watched else nullcontext()
    padding = nullcontext() if counts else padding_ignored(strategy.module)
    with uses, padding:
        yield
