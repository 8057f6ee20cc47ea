"""The outputs of the GLOBAL batch for a loss that compares its samples, such as InfoNCE.

Data parallelism divides a batch, and a loss over the batch would be another function of each part.
Every rank therefore gets the outputs of all samples, and returns the losses of its own:

    rank 0   outputs 0, 2 --+             +--> all outputs 0, 1, 2, 3   losses of samples 0 and 2
                            +-- gather ---+
    rank 1   outputs 1, 3 --+             +--> all outputs 0, 1, 2, 3   losses of samples 1 and 3

The gradient of an output is summed over the losses of all ranks, as on one device.
"""

import math
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab.config.errors import ConfigError, TrainingError, count
from ddp_lab.strategies.base import Strategy
from ddp_lab.tasks.loss_trial import CALLS

MOST_DIMS = 9  # of the rows that are compared


class AllGather(torch.autograd.Function):
    """The rows of all ranks, [W, b, ...], for those of this rank, [b, ...].

    The backward pass sums the gradients of all rows over the ranks, and keeps those of its own. An
    all_reduce sends twice as much as a reduce_scatter, but all backends have it.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(gathered, rows, group=group)
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return SumOfOwn.apply(gradients[0], ctx.group), None


class SumOfOwn(torch.autograd.Function):
    """The rows of this rank, [b, ...], summed over the ranks, of those of all ranks, [W, b, ...].

    It is the derivative of AllGather, and AllGather is its own.
    """

    @staticmethod
    def forward(ctx: Any, gathered: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        dtype = gathered.dtype
        is_coarse = dtype in (torch.bfloat16, torch.float16)  # in which a sum would be rounded
        summed = gathered.float() if is_coarse else gathered.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return summed[group.rank()].to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return AllGather.apply(gradients[0].contiguous(), ctx.group), None


def gather(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of the GLOBAL batch for those of this rank, with a gradient. Collective.

    To be called in a loss, or after `trainer.forward`: on all ranks, in the same order. The batch
    must not be divided into gradient-accumulation steps or micro-batches, which are computed one
    after another.

    Args:
        rows: of this rank's samples, [b, ...]. All ranks have the same shape, but for b.

    Returns:
        Those of all samples, [B, ...], in the order of the GLOBAL batch: row i of rank r is row
            r + W * i of W ranks.

    Raises:
        ConfigError: the batch is divided, `rows` are not those of this rank's samples, or no batch
            is under way.
    """
    CALLS.rows = len(rows)
    CALLS.device = rows.device
    if CALLS.trial is not None:
        CALLS.trial.gathers = True
        return rows

    strategy = active_strategy("gather")
    require_undivided(strategy)
    num_valid = strategy.valid_samples(strategy.global_size)
    if num_valid and len(rows) != num_valid:
        raise ConfigError(
            f"gather: got {count(len(rows), 'row')} on rank {strategy.runtime.rank}, expected "
            f"{num_valid}, "
            "one for each sample of the rank's batch, [b, ...]"
        )
    if strategy.dp_size == 1:
        return rows

    if not (strategy.task.gathers or strategy.in_loop):
        require_samples_everywhere(strategy)
    # Every rank sends as many rows.
    sent = math.ceil(strategy.global_size / strategy.dp_size)
    missing = sent - num_valid
    local_rows = rows[:num_valid]
    if missing:
        local_rows = torch.cat([local_rows, local_rows.new_zeros(missing, *local_rows.shape[1:])])
    group = strategy.dp_group or dist.group.WORLD
    by_rank: Any = AllGather.apply(local_rows.contiguous(), group)
    return in_batch_order(by_rank, strategy.global_size)


def in_batch_order(by_rank: torch.Tensor, size: int) -> torch.Tensor:
    """Return the rows of W ranks, [W, b, ...], in the order of the GLOBAL batch, [size, ...].

    The rows after `size` are padding, and are left out.
    """
    return by_rank.transpose(0, 1).flatten(0, 1)[:size]


def gather_on_rank0(strategy: Strategy, rows: torch.Tensor, name: str) -> torch.Tensor | None:
    """Return the rows of the GLOBAL batch on rank 0, without a gradient. Collective.

    Args:
        strategy: whose batch was begun last.
        rows: of this rank's samples without padding, [b, ...], also under tp and in pipelines,
            where several ranks have the same samples.
        name: what they are; begins a message.

    Returns:
        On rank 0 those of all samples, [B, ...], in the order of the GLOBAL batch; None on other
            ranks.

    Raises:
        TrainingError: the rows of the ranks differ in more than their number.
    """
    runtime = strategy.runtime
    if strategy.dp_size == 1:
        return rows if runtime.is_main else None
    group = strategy.dp_group or dist.group.WORLD
    assert group is not None
    if dist.get_global_rank(group, 0) != 0:  # its ranks have the same samples as those of rank 0's
        return None

    require_same_form(rows, group, name)
    # Every rank sends as many rows, as bytes, because gloo does not send all dtypes.
    sent = math.ceil(strategy.global_size / strategy.dp_size)
    padding = rows.new_zeros(sent - len(rows), *rows.shape[1:])
    local_rows = torch.cat([rows, padding]).contiguous()
    local_bytes = local_rows.view(-1).view(torch.uint8)
    received = None
    if runtime.is_main:
        received = [torch.empty_like(local_bytes) for _ in range(strategy.dp_size)]
    dist.gather(local_bytes, received, group=group, group_dst=0)
    if received is None:
        return None
    by_rank = torch.stack([part.view(rows.dtype).view(local_rows.shape) for part in received])
    return in_batch_order(by_rank, strategy.global_size)


def require_same_form(rows: torch.Tensor, group: dist.ProcessGroup, name: str) -> None:
    """Raise a TrainingError unless the rows of all ranks have the same shape. Collective.

    It waits for the device.

    Args:
        rows: of this rank, [b, ...]; b does not matter.
        group: the ranks.
        name: what the rows are; begins the message.
    """
    shape = [rows.dim(), *rows.shape[1:]]
    form = torch.zeros(MOST_DIMS, dtype=torch.int64, device=rows.device)
    form[: len(shape)] = torch.tensor(shape[:MOST_DIMS])
    extremes = torch.cat([form, -form])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest = extremes[:MOST_DIMS]
    smallest = -extremes[MOST_DIMS:]
    if (largest != smallest).any():
        raise TrainingError(
            f"{name} of a batch have other shapes on other ranks, up to "
            f"{largest[1 : rows.dim()].tolist()} and down to {smallest[1 : rows.dim()].tolist()} "
            "for a sample, so they cannot be gathered. Pad the samples of the dataset to a fixed "
            "length"
        )


def own_rows() -> torch.Tensor:
    """Return which rows of what `gather` returned last are those of this rank's samples, [b].

    Returns:
        Their numbers, int64, on their device: r + W * i for sample i of rank r of W ranks.

    Raises:
        ConfigError: no batch is under way.
    """
    numbers = torch.arange(CALLS.rows, device=CALLS.device)
    if CALLS.trial is not None:
        return numbers
    strategy = active_strategy("own_rows")
    rows = strategy.dp_rank + strategy.dp_size * numbers
    # A rank that has no sample may compute one of padding, which does not count.
    return rows.clamp(max=strategy.global_size - 1)


def active_strategy(function: str) -> Strategy:
    """Return the strategy whose batch is under way.

    Args:
        function: called by the user, for the message.

    Raises:
        ConfigError: there is none.
    """
    strategy = Strategy.active
    if strategy is None:
        raise ConfigError(
            f"{function}: is called in a loss, or after `trainer.forward`, where the batch that is "
            "divided over the ranks is known; there is no such batch here"
        )
    return strategy


def require_samples_everywhere(strategy: Strategy) -> None:
    """Raise a ConfigError if a rank has no sample, and does not know that the loss gathers.

    It would not call the loss, and the others would wait for it.
    """
    if strategy.global_size < strategy.dp_size:
        raise ConfigError(
            f"gather: the first batch has {count(strategy.global_size, 'sample')} for "
            f"{strategy.dp_size} ranks, and the ranks without a sample do not call the loss before "
            "it has been tried. "
            "Let it be tried: lab.trainer(..., example=dataset[0]); or use a larger dataset"
        )


def require_undivided(strategy: Strategy) -> None:
    """Raise a ConfigError if each rank computes its part of the batch in several micro-batches."""
    for key, number in (
        ("accumulate", strategy.accumulate),
        ("strategy.num_microbatches", strategy.num_microbatches),
    ):
        if number > 1:
            raise ConfigError(
                f"{key}={number}: is not supported by a loss that calls ddp_lab.gather, because "
                f"the outputs of one micro-batch are freed before those of the next one. Use "
                f"{key}=1, with more ranks if memory is short"
            )
