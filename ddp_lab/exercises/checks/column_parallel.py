"""Check of column_parallel."""

from types import ModuleType

import torch.distributed as dist

from ddp_lab.exercises.checks.linear import compare, layer
from ddp_lab.exercises.explain import Call, Wrong, unchanged

WRITE = ("shard", "forward", "backward")
RANKS = (2, 3)
HINTS = (
    "weight.chunk(world_size)[rank] are the rows, that is the outputs, of a rank.",
    "Forward is the linear layer with the own rows: x @ rows.T, without communication.",
    "grad_y @ rows lacks what the other ranks' outputs add to the gradient of x: all_reduce it. "
    "That of the weight is local.",
)


def check(theirs: ModuleType, calls: list[Call]) -> None:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    x, weight, _, grad_y = layer(ranks)
    own_rows = weight.chunk(ranks)[rank]
    own_grad = grad_y.chunk(ranks, 1)[rank].contiguous()
    shards = {
        "It takes every world_size-th row: take a block of neighbours.": weight[rank::ranks],
        "It is split by inputs: that is row parallelism. Split the outputs, the rows of "
        "W.": weight.chunk(ranks, 1)[rank],
    }
    compare(unchanged(theirs.shard, weight), own_rows, f"The shard of rank {rank}", shards)
    before = len(calls)
    compare(
        unchanged(theirs.forward, x, own_rows), x @ own_rows.T, f"The output of rank {rank}", {}
    )

    if len(calls) > before:
        text = (
            f"forward calls {calls[before].name} at line {calls[before].line}: every rank has x "
            "and its rows, "
        )
        raise Wrong(text + "so nothing is sent.")

    returned = unchanged(theirs.backward, x, own_rows, own_grad)
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise Wrong(
            f"backward returned {type(returned).__name__}: expected a tuple of the gradients of x "
            "and of the own rows"
        )

    partial = own_grad @ own_rows
    local = "It has only the terms of this rank's outputs: sum it over the ranks."
    mean = "It is the average over the ranks: the terms of all outputs are summed."
    compare(
        returned[0],
        grad_y @ weight,
        f"The gradient of x on rank {rank}",
        {local: partial, mean: grad_y @ weight / ranks},
    )
    summed = sum((part.T @ x for part in grad_y.chunk(ranks, 1)), start=own_grad.T @ x * 0)
    causes = {
        "It was summed over the ranks: they have different rows, and their gradients must not be "
        "added.": summed
    }
    compare(returned[1], own_grad.T @ x, f"The gradient of rank {rank}'s rows", causes)
