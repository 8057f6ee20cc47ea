"""The sums of two GPUs as operations of torch, which torch.compile keeps as parts of one graph.

Each operation has a description of its output (`register_fake`), by which torch compiles what comes
after it without running it. A group is passed by its name, because tensors, numbers and strings are
what an operation takes.
"""

from collections.abc import Sequence

import torch

from ddp_lab.strategies.peer_sums import SUMS_OF_GROUPS


@torch.library.custom_op("ddp_lab::start_peer_sum", mutates_args=())
def start(addend: torch.Tensor, group: str) -> torch.Tensor:
    """Begin a sum of the group. Return an empty tensor, which orders `finish` after it."""
    SUMS_OF_GROUPS[group].start(addend)
    return addend.new_empty(0)


@start.register_fake
def _(addend: torch.Tensor, group: str) -> torch.Tensor:
    return addend.new_empty(0)


@torch.library.custom_op("ddp_lab::finish_peer_sum", mutates_args=())
def finish(addends: list[torch.Tensor], started: list[torch.Tensor], group: str) -> torch.Tensor:
    """Return the sums of contiguous tensors, concatenated along the first dimension.

    Args:
        addends: what `start` got.
        started: what it has returned.
    """
    sums, outs = room_for(addends)
    for each, out in zip(addends, outs, strict=True):
        SUMS_OF_GROUPS[group].add(each, each, out)
    return sums


@finish.register_fake
def _(addends: list[torch.Tensor], started: list[torch.Tensor], group: str) -> torch.Tensor:
    sums, _ = room_for(addends)
    return sums


@torch.library.custom_op("ddp_lab::start_peer_scatter", mutates_args=())
def start_scatter(addend: torch.Tensor, group: str) -> torch.Tensor:
    """Begin the sum of what both ranks have for all tokens, [b, n, width], of which each gets half.

    Returns:
        The other rank's half, [b, n / 2, width], which is sent.
    """
    peer_sums = SUMS_OF_GROUPS[group]
    sent = addend.chunk(2, 1)[1 - peer_sums.rank].clone(memory_format=torch.contiguous_format)
    peer_sums.start(sent)
    return sent


@start_scatter.register_fake
def _(addend: torch.Tensor, group: str) -> torch.Tensor:
    return half_of(addend)


@torch.library.custom_op("ddp_lab::finish_peer_scatter", mutates_args=())
def finish_scatter(
    addends: list[torch.Tensor], sent: list[torch.Tensor], group: str
) -> torch.Tensor:
    """Return this rank's half of the sums, concatenated along the first dimension.

    Args:
        addends: what `start_scatter` got.
        sent: what it has returned.
    """
    peer_sums = SUMS_OF_GROUPS[group]
    sums, outs = room_for(sent)
    for addend, half, out in zip(addends, sent, outs, strict=True):
        peer_sums.add(half, addend.chunk(2, 1)[peer_sums.rank], out)
    return sums


@finish_scatter.register_fake
def _(addends: list[torch.Tensor], sent: list[torch.Tensor], group: str) -> torch.Tensor:
    sums, _ = room_for(sent)
    return sums


@torch.library.custom_op("ddp_lab::peer_gather", mutates_args=())
def gather(tokens: torch.Tensor, group: str) -> torch.Tensor:
    """Return the tokens of both ranks, [b, 2 n, width], for those of this one, [b, n, width]."""
    peer_sums = SUMS_OF_GROUPS[group]
    sent = tokens.contiguous()
    peer_sums.start(sent)
    complete = twice(tokens)
    halves = complete.chunk(2, 1)
    halves[peer_sums.rank].copy_(tokens)  # while the other rank's are under way
    peer_sums.receive(sent, halves[1 - peer_sums.rank])
    return complete


@gather.register_fake
def _(tokens: torch.Tensor, group: str) -> torch.Tensor:
    return twice(tokens)


def half_of(tokens: torch.Tensor) -> torch.Tensor:
    """Return memory for half of the tokens, [b, n / 2, width], of [b, n, width]."""
    samples, number, *others = tokens.shape
    return tokens.new_empty(samples, number // 2, *others)


def twice(tokens: torch.Tensor) -> torch.Tensor:
    """Return memory for twice as many tokens, [b, 2 n, width], as [b, n, width]."""
    samples, number, *others = tokens.shape
    return tokens.new_empty(samples, 2 * number, *others)


def room_for(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Return memory for tensors concatenated along the first dimension, and the part of each."""
    lengths = [len(each) for each in parts]
    whole = parts[0].new_empty(sum(lengths), *parts[0].shape[1:])
    return whole, whole.split(lengths)
