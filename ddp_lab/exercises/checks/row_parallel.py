"""Check of row_parallel."""

from types import ModuleType

import torch.distributed as dist

from ddp_lab.exercises.checks.linear import compare, layer
from ddp_lab.exercises.explain import Call, Wrong, unchanged

WRITE = ("forward", "backward")
RANKS = (2, 3)
HINTS = (
    "own_x @ shard.T has the shape of all outputs, but only the terms of the own inputs.",
    "Add the bias once: after the all_reduce.",
    "Backward: grad_y @ shard, grad_y.T @ own_x and grad_y.sum(0), all without communication.",
)


def check(theirs: ModuleType, calls: list[Call]) -> None:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    x, weight, bias, grad_y = layer(ranks)
    own_x = x.chunk(ranks, 1)[rank].contiguous()
    own_columns = weight.chunk(ranks, 1)[rank].contiguous()
    y = x @ weight.T
    causes = {
        "It has only the terms of this rank's inputs: sum it over the ranks.": own_x @ own_columns.T
        + bias,
        f"The bias was added {ranks} times, once on each rank before the sum: add it after the "
        "all-reduce.": y + ranks * bias,
        "The bias is missing.": y,
        "It is the average over the ranks: the terms of all inputs are summed.": y / ranks + bias,
    }
    compare(
        unchanged(theirs.forward, own_x, own_columns, bias),
        y + bias,
        f"The output of rank {rank}",
        causes,
    )
    before = len(calls)

    returned = theirs.backward(own_x, own_columns, grad_y.clone())
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        raise Wrong(
            f"backward returned {type(returned).__name__}: expected a tuple of three gradients"
        )

    extra = calls[before:]
    if extra:
        text = (
            f"backward calls {extra[0].name} at line {extra[0].line}: every rank has the gradient "
            "of all outputs, "
        )
        raise Wrong(text + "which is all that its own inputs and columns need.")

    names = (
        f"The gradient of rank {rank}'s inputs",
        f"The gradient of rank {rank}'s columns",
        "The gradient of the bias",
    )

    divided = (
        "It was divided by the number of ranks: each rank has the whole gradient of the outputs, "
        "so nothing is averaged."
    )
    for name, value, expected in zip(
        names, returned, (grad_y @ own_columns, grad_y.T @ own_x, grad_y.sum(0)), strict=True
    ):
        compare(value, expected, name, {divided: expected / ranks})
