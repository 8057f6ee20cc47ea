"""Check of weighted_mean."""

from types import ModuleType

import torch
import torch.distributed as dist

from ddp_lab.exercises.explain import Call, Wrong, of_all_ranks, unchanged

WRITE = ("weighted_mean",)
RANKS = (2, 3)
HINTS = (
    "Two sums are enough, and both can be added over the ranks.",
    "Divide after the all-reduce: a mean of means gives a rank with few elements too much weight.",
    "torch.stack([(values * weights).sum(), weights.sum()]) is one tensor, so one all_reduce sums "
    "both.",
)


def check(theirs: ModuleType, calls: list[Call]) -> None:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    sizes = [2, 5, 0][:ranks]
    values = [
        torch.rand(size, generator=generator, dtype=torch.float64) + each
        for each, size in enumerate(sizes)
    ]
    weights = [
        torch.randint(0, 3, (size,), generator=generator).double() + (each == 0)
        for each, size in enumerate(sizes)
    ]
    compare(unchanged(theirs.weighted_mean, values[rank], weights[rank]), values, weights)

    zeros = [torch.zeros_like(each) for each in weights]
    means = of_all_ranks(unchanged(theirs.weighted_mean, values[rank], zeros[rank]))
    if means != [0.0] * ranks:
        raise Wrong(
            f"With weights of 0 alone the mean is {means[0]} on rank 0: expected 0.0; check the "
            "sum before you divide by it."
        )

    needed = sum(call.name in ("all_reduce", "all_gather", "all_gather_object") for call in calls)
    if needed > 4:
        raise Wrong(
            f"The mean is right, but needs {needed // 2} collectives: all sums fit into one tensor "
            "and one all-reduce."
        )


def compare(results: object, values: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    """Raise an error if a rank's result is not the weighted mean over the elements of all ranks."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    if not isinstance(results, float):
        raise Wrong(
            f"weighted_mean returned {type(results).__name__} on rank {rank}: expected a float"
        )

    all_values = torch.cat(values)
    all_weights = torch.cat(weights)
    expected = float((all_values * all_weights).sum() / all_weights.sum())
    if abs(results - expected) < 1e-9:
        return

    has = [index for index, each in enumerate(weights) if len(each)]
    means = {
        index: float((values[index] * weights[index]).sum() / weights[index].sum()) for index in has
    }

    causes = {
        float(all_values.mean()): "The weights were not used.",
        means.get(
            rank, 0.0
        ): "This is the mean of the rank's own elements: nothing was added over the ranks.",
        sum(means.values())
        / ranks: "This is the mean of the ranks' means, in which a rank with few elements counts "
        "too much.",
        float(
            (all_values * all_weights).sum() / len(all_values)
        ): "It was divided by the number of elements: divide by the weights.",
        float(
            (all_values * all_weights).sum() / weights[rank].sum().clamp(min=1)
        ): "The weights were not added over the ranks.",
    }
    if not len(values[rank]):
        causes[0.0] = (
            "A rank without elements has the mean of all, too: every rank must call the all-reduce."
        )

    why = [cause for value, cause in causes.items() if abs(results - value) < 1e-9]
    default = ""
    if results != results:
        default = "It is not a number: a rank without elements divides 0 by 0."
    sizes = [len(each) for each in values]
    raise Wrong(
        f"Ranks with {sizes} elements: rank {rank} returned {results:.6g}, expected "
        f"{expected:.6g}. {(why or [default])[0]}"
    )
