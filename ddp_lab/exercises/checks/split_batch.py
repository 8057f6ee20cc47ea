"""Check of split_batch."""

from types import ModuleType

import torch
import torch.distributed as dist

from ddp_lab.config.errors import count
from ddp_lab.exercises.explain import Call, Wrong, expect_tensor, named, unchanged

WRITE = ("local_batch",)
RANKS = (2, 3)
HINTS = (
    "A slice has a start, an end and a step.",
    "Rank r starts at position r, and its next sample is world_size positions further.",
    "global_batch[start::step] needs no loop and no division.",
)


def check(theirs: ModuleType, calls: list[Call]) -> None:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    for samples in (2 * ranks, 2 * ranks + 1, ranks - 1):
        batch = torch.arange(2 * samples).reshape(samples, 2)
        parts = [unchanged(theirs.local_batch, batch, each, ranks) for each in range(ranks)]
        expected = batch[rank::ranks]
        samples_of_ranks = [
            row
            for part in parts
            if isinstance(part, torch.Tensor) and part.dim() == 2
            for row in part[:, 0].div(2).tolist()
        ]
        about = f"rank {rank} of {ranks}, a global batch of {count(samples, 'sample')}"
        own_samples = expect_rows(parts[rank], about)
        at = own_samples[:, 0].div(2).long().tolist()
        wanted = list(range(rank, samples, ranks))
        text = (
            f"of a global batch of {count(samples, 'sample')}, rank {rank} of {ranks} got "
            f"{named('sample', at)}: expected {named('sample', wanted)}. "
        )

        if (
            sorted(samples_of_ranks) == list(range(samples))
            and at == list(range(at[0], at[-1] + 1) if at else [])
            and at != wanted
        ):
            raise Wrong(
                text + "These are neighbours: every rank takes a block, but a rank's samples are "
                "world_size apart."
            )

        if len(samples_of_ranks) < samples and len(set(samples_of_ranks)) == len(samples_of_ranks):
            lost = sorted(set(range(samples)) - set(map(int, samples_of_ranks)))
            raise Wrong(
                text + f"No rank got {named('sample', lost)}: the remainder of samples / "
                "world_size is lost."
            )

        if (
            sorted(set(samples_of_ranks)) == list(range(samples))
            and len(samples_of_ranks) > samples
        ):
            twice = sorted(
                {int(each) for each in samples_of_ranks if samples_of_ranks.count(each) > 1}
            )
            raise Wrong(
                f"{count(samples, 'sample')} on {ranks} ranks: computed twice: "
                f"{named('sample', twice)}, by padding or because the parts overlap."
            )

        expect_tensor(
            own_samples,
            expected.shape,
            f"local_batch (rank {rank} of {ranks}, {count(samples, 'sample')})",
            batch.dtype,
        )
        if not torch.equal(own_samples, expected):
            raise Wrong(
                text + "Does the slice begin at the rank, and is its step the number of ranks?"
            )


def expect_rows(value: object, name: str) -> torch.Tensor:
    """Return the local batch, which must be two-dimensional as the global one."""
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        if isinstance(value, torch.Tensor):
            got = f"a tensor of {count(value.dim(), 'dimension')}"
        else:
            got = type(value).__name__
        raise Wrong(
            f"{name}: local_batch returned {got}: expected a tensor of 2 dimensions like the "
            "global batch"
        )
    return value
