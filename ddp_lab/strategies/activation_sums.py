"""Sums of activations over the ranks along tp, begun at one place and ended later.

What is computed between the two places hides the communication:

    own --start_sum--> [gradient of a weight, next chunk] --finish_sum--> the sum, on every rank

The ranks either have all tokens between two pairs of layers, and the sum is an all_reduce; or, with
sequence parallelism, each has 1/tp of them: the sum is a reduce_scatter, and `gather` collects the
tokens before the next pair. On two GPUs that reach each other's memory all of these consist of
peer copies (peer_sums.py).

The operations are those that torch.compile keeps as parts of a graph, so a compiled block remains
one graph.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_lab.strategies import peer_sum_ops, peer_sums

# The public functions return wrapped tensors that wait by themselves, at their first use.
collectives = torch.ops._c10d_functional


class TokenGroup(NamedTuple):
    """The ranks that share the layers of a block.

    Attributes:
        name: of their process group.
        ranks: their number.
        share_tokens: whether each has 1/ranks of the tokens between two pairs (sequence
            parallelism).
        peers: whether the collectives consist of peer copies.
    """

    name: str
    ranks: int
    share_tokens: bool
    peers: bool


def make_group(
    group: dist.ProcessGroup, share_tokens: bool, device: torch.device
) -> tuple[TokenGroup, peer_sums.PeerSums | None]:
    """Return the group of the ranks along tp, and what the caller gives to `Runtime.keep`.

    Collective.

    Args:
        share_tokens: as in `TokenGroup`.
        device: of this rank.
    """
    peers = peer_sums.find(group, device)
    return TokenGroup(group.group_name, group.size(), share_tokens, peers is not None), peers


def gather(tokens: torch.Tensor, group: TokenGroup) -> torch.Tensor:
    """Return all tokens, [b, n, width], for those of this rank, [b, n / ranks, width] or all.

    Collective.
    """
    if not group.share_tokens:
        return tokens
    if group.peers:
        return peer_sum_ops.gather(tokens, group.name)
    gathered = collectives.all_gather_into_tensor(tokens.contiguous(), group.ranks, group.name)
    return torch.cat(collectives.wait_tensor(gathered).chunk(group.ranks), 1)


def start_sum(addend: torch.Tensor, group: TokenGroup) -> torch.Tensor:
    """Begin the sum of what each rank has for all tokens, [b, n, width]. Collective.

    Returns:
        What `finish_sum` needs. It has no values before.
    """
    if group.share_tokens and group.peers:
        return peer_sum_ops.start_scatter(addend, group.name)
    if group.share_tokens:
        by_rank = torch.cat(addend.chunk(group.ranks, 1))
        return collectives.reduce_scatter_tensor(by_rank, "sum", group.ranks, group.name)
    if group.peers:
        return peer_sum_ops.start(addend, group.name)
    return collectives.all_reduce(addend, "sum", group.name)


def finish_sum(
    addends: list[torch.Tensor], started: list[torch.Tensor], group: TokenGroup
) -> torch.Tensor:
    """Return the sums of a batch's chunks, of the rank's tokens between two pairs, as one tensor.

    Args:
        addends: what this rank has added, by chunk along the first dimension.
        started: what `start_sum` has returned for each.
    """
    if group.peers:
        finish = peer_sum_ops.finish_scatter if group.share_tokens else peer_sum_ops.finish
        return finish(addends, started, group.name)
    sums = [collectives.wait_tensor(each) for each in started]
    return sums[0] if len(sums) == 1 else torch.cat(sums)
