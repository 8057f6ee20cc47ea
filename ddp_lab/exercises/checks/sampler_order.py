"""Check of sampler_order against torch's own DistributedSampler."""

from types import ModuleType
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset

from ddp_lab.config.errors import count
from ddp_lab.exercises.explain import Call, Wrong, of_all_ranks, plain

WRITE = ("epoch_indices",)
RANKS = (2, 3)
HINTS = (
    "Every rank draws the permutation of ALL samples; the rank decides only which positions it "
    "takes.",
    "torch.Generator().manual_seed(seed + epoch), then torch.randperm(samples, generator=...).",
    "Repeat the first -samples % world_size entries at the end, then take [rank::world_size].",
)


def check(theirs: ModuleType, calls: list[Call]) -> None:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    for samples in (4 * ranks, 4 * ranks + 1):
        drawn = {}
        for epoch in (0, 1):
            sampler = DistributedSampler(TensorDataset(torch.zeros(samples)), ranks, rank, seed=7)
            sampler.set_epoch(epoch)
            with patch.object(
                DistributedSampler,
                "__init__",
                side_effect=Wrong("DistributedSampler: write its order yourself."),
            ):
                indices = plain(theirs.epoch_indices(samples, 7, epoch, rank, ranks))
            if not isinstance(indices, list):
                raise Wrong(
                    f"epoch_indices returned {type(indices).__name__}: expected a list of int"
                )
            drawn[epoch] = of_all_ranks(indices), of_all_ranks(list(sampler))
        explain(samples, *drawn[0], *drawn[1])


def explain(
    samples: int,
    indices: list[list[int]],
    expected: list[list[int]],
    later: list[list[int]],
    then: list[list[int]],
) -> None:
    """Raise an error about the first difference.

    Args:
        samples: number of samples.
        indices: the indices of each rank in the first epoch.
        expected: those of DistributedSampler.
        later: `found` in the second epoch.
        then: `expected` in the second epoch.
    """
    if indices == expected and later == then:
        return
    ranks = len(indices)
    rank = next(
        rank
        for rank in range(ranks)
        if (indices[rank], later[rank]) != (expected[rank], then[rank])
    )
    text = (
        f"{samples} samples on {ranks} ranks: rank {rank} reads {indices[rank] or 'no sample'}, "
        f"expected {expected[rank]}. "
    )
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(7)).tolist()
    everything = sorted(index for each in indices for index in each)

    if indices == expected and later == indices:
        raise Wrong(
            f"Rank {rank} reads {indices[rank] or 'no sample'} in every epoch: the epoch must be "
            "part of the "
            "generator's seed."
        )

    if len({len(each) for each in indices}) > 1:
        text += (
            "Ranks have different numbers of samples: repeat the beginning of the permutation, or "
            "some wait at the last step."
        )
    elif len(everything) < samples:
        text += (
            f"No rank reads {count(samples - len(everything), 'sample')}: the remainder is dropped "
            "instead of padded."
        )
    elif indices == [list(range(samples))[rank::ranks] for rank in range(ranks)]:
        text += "The samples are not shuffled."
    elif indices == [
        (order + order[: -samples % ranks])[rank * len(each) :][: len(each)]
        for rank, each in enumerate(indices)
    ]:
        text += "Every rank takes a block of the permutation: take every world_size-th position."
    elif set(everything) != set(range(samples)):
        text += (
            "Some samples are read by several ranks and others by none: every rank must draw the "
            "same permutation."
        )
    elif [each[:-1] for each in indices] == [each[:-1] for each in expected]:
        text += "Only the padding differs: repeat samples from the beginning of the permutation."
    raise Wrong(text)
