"""Check of buckets."""

from types import ModuleType

import torch.distributed as dist

from ddp_lab.config.errors import count
from ddp_lab.exercises.explain import Call, Wrong, contribution, describe_sum, named, plain

WRITE = ("fill_buckets", "all_reduce_buckets")
RANKS = (2, 3)
HINTS = (
    "Go through reversed(range(len(sizes))) and look only at the last bucket: does the next "
    "gradient fit into it?",
    "torch.cat([gradients[index].flatten() for index in bucket]) is the flattened bucket.",
    "flat.split(sizes of the bucket) cuts the sums in the same order; copy_ each into its "
    "gradient, with view_as.",
)
SHAPES = [(2,), (3, 1), (2, 2), (1,), (6,)]
CASES = {
    5: [[4], [3, 2], [1, 0]],
    6: [[4], [3, 2], [1, 0]],
    100: [[4, 3, 2, 1, 0]],
    7: [[4, 3], [2, 1], [0]],
}


def check(theirs: ModuleType, calls: list[Call]) -> None:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    sizes = [contribution(0, shape).numel() for shape in SHAPES]
    for limit, expected in CASES.items():
        check_buckets(plain(theirs.fill_buckets(list(sizes), limit)), expected, sizes, limit)
        gradients = [contribution(rank, shape) * (index + 1) for index, shape in enumerate(SHAPES)]
        before = len(calls)
        theirs.all_reduce_buckets(gradients, limit)
        collectives = len([call for call in calls[before:] if call.name == "all_reduce"])
        for index, gradient in enumerate(gradients):
            value = float(gradient.flatten()[0]) / (index + 1)
            if describe_sum(value, ranks) == "the sum of all ranks":
                continue
            text = (
                f"limit={limit}: gradient {index} on rank {rank} holds "
                f"{describe_sum(value, ranks)}, not the sum of all ranks. "
            )
            if value == 10.0**rank:
                text += "Was the sum copied back into the gradient? torch.cat makes a copy."
            elif any(
                float(gradient.flatten()[0]) == (other + 1) * sum(10**r for r in range(ranks))
                for other in range(5)
            ):
                text += (
                    "It holds the sum of another gradient: cut the bucket in the order in which it "
                    "was put together."
                )
            raise Wrong(text)

        if collectives != len(expected):
            raise Wrong(
                f"limit={limit}: the sums are right, but took {count(collectives, 'all-reduce')}: "
                "expected "
                f"{len(expected)}, one for each bucket."
            )


def check_buckets(buckets: object, expected: list[list[int]], sizes: list[int], limit: int) -> None:
    """Raise an error if the buckets are not the expected ones."""
    if buckets == expected:
        return
    text = f"fill_buckets({sizes}, {limit}) returned {buckets}, expected {expected}. "
    if not isinstance(buckets, list) or not all(isinstance(bucket, list) for bucket in buckets):
        raise Wrong(text + "Return a list of lists of indices.")

    indices = [index for bucket in buckets for index in bucket]
    lost = sorted(set(range(len(sizes))) - set(indices))
    if lost:
        text += (
            f"In no bucket: {named('gradient', lost)}. A bucket that is not full, or one above the "
            "limit, counts as well."
        )
    elif any(
        len(bucket) > 1 and sum(sizes[index] for index in bucket) > limit for bucket in buckets
    ):
        text += "A bucket exceeds the limit: close it before the gradient that would exceed it."
    elif indices == sorted(indices):
        text += "The first gradient comes first: the backward pass completes the last one first."
    elif [] in buckets:
        text += "There is an empty bucket."
    raise Wrong(text)
