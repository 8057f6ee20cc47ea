"""Check of resume_epoch: a launch of another number of ranks has read the first batches."""

from types import ModuleType

import torch
import torch.distributed as dist

from ddp_lab.exercises.explain import Call, Wrong, named, of_all_ranks, plain

WRITE = ("remaining_batches",)
RANKS = (2, 3)
HINTS = (
    "Draw the whole permutation as at the beginning of the epoch; only then leave out what is "
    "done.",
    "`done` counts the samples of all ranks, so it is a position in the permutation.",
    "range(done, samples, batch_size) are the starts of the remaining global batches; the last may "
    "be short.",
)
SAMPLES = 23
SEED = 3
BATCH = 6


def check(theirs: ModuleType, calls: list[Call]) -> None:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED)).tolist()
    for done in (0, 2 * BATCH):
        batches_of_ranks = of_all_ranks(
            plain(theirs.remaining_batches(SAMPLES, SEED, done, BATCH, rank, ranks))
        )
        expected = [
            [order[start : start + BATCH][each::ranks] for start in range(done, SAMPLES, BATCH)]
            for each in range(ranks)
        ]
        if batches_of_ranks != expected:
            explain(batches_of_ranks, expected, order, done)


def explain(
    batches_of_ranks: list[list[list[int]]],
    expected: list[list[list[int]]],
    order: list[int],
    done: int,
) -> None:
    """Raise an error: the ranks' remaining batches are not the expected ones."""
    ranks = len(batches_of_ranks)
    rank = next(each for each in range(ranks) if batches_of_ranks[each] != expected[each])
    text = (
        f"After {done} of {SAMPLES} samples, on {ranks} ranks: rank {rank} reads "
        f"{batches_of_ranks[rank] or 'no batch'}, expected {expected[rank]}. "
    )
    try:
        read = [index for batches in batches_of_ranks for batch in batches for index in batch]
    except TypeError:
        raise Wrong(text + "Return a list of lists of indices.") from None

    again = sorted(set(read) & set(order[:done]))
    lost = sorted(set(order[done:]) - set(read))
    if sorted(read) == sorted(order[done:]):
        text += (
            "All remaining samples are read once, but not in the batches of an uninterrupted run: "
            "cut the permutation into global batches first, then take every world_size-th position "
            "of each."
        )
    elif done and len(read) == len(order) and set(read) == set(order):
        text += "The epoch begins again: leave out what was read before the checkpoint."
    elif again and not lost:
        text += (
            f"Read again: {named('sample', again)}. `done` counts the samples of all ranks, not of "
            "one."
        )
    elif again:
        text += (
            f"Read again: {named('sample', again)}. Never read: {named('sample', lost)}. Draw the "
            f"same permutation, then leave out the first {done}."
        )
    elif not lost:
        text += "Some samples are read more than once: each position belongs to one rank."
    elif len(lost) <= len(order[done:]) % BATCH:
        text += f"Never read: {named('sample', lost)}. The last global batch is short, but counts."
    else:
        text += (
            f"Never read: {named('sample', lost)}. Too many are left out; `done` counts the "
            "samples of all ranks."
        )
    raise Wrong(text)
