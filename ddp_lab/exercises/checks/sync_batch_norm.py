"""Check of sync_batch_norm."""

from types import ModuleType

import torch
import torch.distributed as dist

from ddp_lab.exercises.explain import Call, Wrong, expect_tensor, unchanged

WRITE = ("global_statistics",)
RANKS = (2, 3)
HINTS = (
    "Two all-reduces are enough: the mean first, because the variance is about it.",
    "Ranks have different numbers of samples, so add sums and counts, never means.",
    "sum over (0, 2, 3), and the number of elements of one channel: inputs[:, 0].numel().",
)


def check(theirs: ModuleType, calls: list[Call]) -> None:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    sizes = [3, 1, 0][:ranks]
    # The ranks' values are far apart, so that the variance between the ranks counts.
    batches = [
        torch.rand(size, 2, 2, 3, generator=generator, dtype=torch.float64) + 5 * each
        for each, size in enumerate(sizes)
    ]
    returned = unchanged(theirs.global_statistics, batches[rank])
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise Wrong(
            f"global_statistics returned {type(returned).__name__}: expected a tuple of the mean "
            "and the variance"
        )

    if isinstance(returned[0], torch.Tensor) and returned[0].dim() != 1:
        raise Wrong(
            f"The mean has the shape {list(returned[0].shape)}: expected [2], one number for each "
            "channel, over the samples and the pixels: dimensions 0, 2 and 3."
        )

    mean, variance = (expect_tensor(each, [2], "global_statistics") for each in returned)
    everything = torch.cat(batches).transpose(0, 1).flatten(1)
    has = [batch.transpose(0, 1).flatten(1) for batch in batches if len(batch)]
    text = f"Local batches of {sizes} samples, rank {rank}: "
    if not torch.allclose(mean, everything.mean(1)):
        text += (
            f"the mean of channel 0 is {float(mean[0]):.6g}, expected "
            f"{float(everything[0].mean()):.6g}. "
        )
        own_values = batches[rank].transpose(0, 1).flatten(1)
        if mean.isnan().any():
            text += (
                "It is not a number: a rank without samples divides 0 by 0 before the all-reduce."
            )
        elif len(own_values[0]) and torch.allclose(mean, own_values.mean(1)):
            text += "This is the mean of the rank's own samples: nothing was added over the ranks."
        elif torch.allclose(mean, torch.stack([each.mean(1) for each in has]).sum(0) / ranks):
            text += (
                "This is the mean of the ranks' means, in which the rank with one sample counts as "
                "much as that with three."
            )
        elif torch.allclose(mean, everything.sum(1) / max(1, len(own_values[0]))):
            text += (
                "It was divided by the rank's own number of elements: the count has to be added "
                "over the ranks, too."
            )
        raise Wrong(text)

    if not torch.allclose(variance, everything.var(1, correction=0)):
        text += (
            f"the variance of channel 0 is {float(variance[0]):.6g}, expected "
            f"{float(everything[0].var(correction=0)):.6g}. "
        )
        variances = torch.stack([each.var(1, correction=0) for each in has])
        lengths = torch.tensor([len(each[0]) for each in has], dtype=torch.float64)
        within = lengths @ variances / lengths.sum()
        if torch.allclose(variance, everything.var(1)):
            text += (
                "It was divided by n - 1: batch normalization uses the biased variance, divided by "
                "n."
            )
        elif torch.allclose(variance, within) or torch.allclose(variance, variances.sum(0) / ranks):
            text += (
                "It lacks the variance between the ranks: take the squares about the GLOBAL mean."
            )
        elif torch.allclose(variance, everything.square().mean(1)):
            text += "This is the mean of the squares: subtract the mean first."
        raise Wrong(text)
