"""Check of fully_sharded against one device with the whole weight and the global batch."""

from types import ModuleType

import torch
import torch.distributed as dist

from ddp_lab.exercises.explain import Call, Wrong, expect_only, expect_tensor, unchanged

WRITE = ("gather", "gradient_of_own_rows")
RANKS = (2, 3)
HINTS = (
    "dist.all_gather(list of tensors, shard) fills the list in the order of the ranks; torch.cat "
    "joins it.",
    "The gradient of half the squares of inputs @ weight.T is outputs.T @ inputs, of the shape of "
    "the weight.",
    "dist.reduce_scatter_tensor(output, input) sums the inputs of all ranks and leaves rank r the "
    "r-th part of the rows.",
)
COLUMNS = 2


def check(theirs: ModuleType, calls: list[Call]) -> None:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    weight = torch.rand(2 * ranks, COLUMNS, generator=generator, dtype=torch.float64)
    inputs = torch.rand(2 * ranks + 1, COLUMNS, generator=generator, dtype=torch.float64)
    own_rows = weight.chunk(ranks)[rank].clone()
    gathered = expect_tensor(unchanged(theirs.gather, own_rows), weight.shape, "gather")
    if not torch.equal(gathered, weight):
        text = (
            f"Rank {rank}: gather returned rows {rows_in(gathered, weight)}, expected "
            f"{list(range(len(weight)))}. "
        )
        raise Wrong(
            text
            + "Its own rows must be sent, and the ranks' rows joined in the order of the ranks."
        )

    # as after a step: what was gathered before is of no use
    weight = weight.square()
    own_rows = own_rows.square()
    returned = unchanged(theirs.gradient_of_own_rows, own_rows, inputs[rank::ranks], len(inputs))
    sums = [call for call in calls if call.name == "all_reduce"]
    expect_only(sums, (), "a reduce_scatter sums, and leaves each rank only its own rows")
    if isinstance(returned, torch.Tensor) and returned.shape == weight.shape:
        raise Wrong(
            f"Rank {rank} returned the gradient of the whole weight: it keeps only its own rows, "
            f"[{len(own_rows)}, {COLUMNS}]."
        )
    gradient_rows = expect_tensor(returned, own_rows.shape, "gradient_of_own_rows")
    explain(gradient_rows, weight, inputs, rank, ranks)


def explain(
    value: torch.Tensor, weight: torch.Tensor, inputs: torch.Tensor, rank: int, ranks: int
) -> None:
    """Raise an error if the rows of the gradient are not the expected ones."""
    expected = (inputs @ weight.T).T @ inputs / len(inputs)
    part = expected.chunk(ranks)[rank]
    if torch.allclose(value, part):
        return

    text = (
        f"The gradient of rank {rank}'s first row begins with {float(value[0, 0]):.4g}, expected "
        f"{float(part[0, 0]):.4g}. "
    )
    local = (inputs[rank::ranks] @ weight.T).T @ inputs[rank::ranks] / len(inputs)
    if torch.allclose(value, local.chunk(ranks)[rank]):
        text += "It is that of the local batch: sum it over the ranks with a reduce-scatter."
    elif torch.allclose(value, part * len(inputs)):
        text += "It was not divided by the size of the global batch."
    elif torch.allclose(
        value, (inputs @ weight.sqrt().T).T.chunk(ranks)[rank] @ inputs / len(inputs)
    ):
        text += (
            "It is that of the weight that was gathered before the last step: gather it each time."
        )
    elif torch.allclose(value, part / ranks):
        text += (
            "It is the average over the ranks: the sum is divided by the size of the global batch "
            "already."
        )
    elif any(torch.allclose(value, other) for other in expected.chunk(ranks)):
        text += "These are the rows of another rank."
    raise Wrong(text)


def rows_in(gathered: torch.Tensor, weight: torch.Tensor) -> list[int | str]:
    """Return which row of the weight each gathered row is."""
    equal = [
        [index for index, row in enumerate(weight) if torch.equal(row, each)] for each in gathered
    ]
    return [matching[0] if matching else "unknown" for matching in equal]
