"""Check of average_or_sum: the gradient of a weight, whose mean over the global batch is known."""

import math
from types import ModuleType

import torch
import torch.distributed as dist

from ddp_lab.config.errors import count
from ddp_lab.exercises.explain import Call, Wrong, expect_only, expect_tensor, of_all_ranks

WRITE = ("loss_of_rank",)
RANKS = (2, 3)
HINTS = (
    "Write down the mean over the global batch, and sort its terms by rank.",
    "Every sample has the same weight in that mean, whichever rank computes it: 1 / "
    "global_batch_size.",
    "The mean of a rank's samples divides by the local size, which differs between ranks: begin "
    "with losses.sum().",
)


def check(theirs: ModuleType, calls: list[Call]) -> None:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    for samples in (4 * ranks, 4 * ranks + 1, ranks - 1):
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        inputs = torch.arange(1.0, samples + 1, dtype=torch.float64).square()
        returned = theirs.loss_of_rank(weight * inputs[rank::ranks], samples)
        expect_only(calls, (), "the gradients are summed after it")
        if any(of_all_ranks(isinstance(returned, torch.Tensor) and not returned.requires_grad)):
            raise Wrong(
                "The returned loss has no gradient: item(), float() and detach() cut it off. "
                "Compute with tensors."
            )

        loss = expect_tensor(returned, [], "loss_of_rank")
        loss.backward()
        gradient = sum(of_all_ranks(0.0 if weight.grad is None else float(weight.grad)))
        total = sum(of_all_ranks(loss.item()))
        explain(
            (gradient if math.isfinite(total) else total) / float(inputs.mean()), samples, ranks
        )


def explain(ratio: float, samples: int, ranks: int) -> None:
    """Raise an error if the sum of the gradients is not the expected one, but `ratio` times it."""
    if abs(ratio - 1) < 1e-9:
        return
    text = (
        f"With {count(samples, 'sample')} on {ranks} ranks the summed gradient is {ratio:.3g} "
        "times that of "
        "the global mean. "
    )
    if ratio != ratio:
        text += "It is not a number: the mean of an empty local batch is 0 / 0, but its sum is 0."
    elif abs(ratio - samples) < 1e-9:
        text += "The sum of the losses was not divided by anything."
    elif abs(ratio - samples / ranks) < 1e-9:
        text += "It was divided by the number of ranks: divide by the number of samples."
    elif abs(ratio - 1 / ranks) < 1e-9:
        text += (
            "It was divided by the number of ranks as well: the gradients are summed, not averaged."
        )
    elif samples % ranks == 0 and abs(ratio - ranks) < 1e-9:
        text += (
            "Each rank divided by its local batch size: the sum of the means of the ranks is not "
            "the mean of all."
        )
    else:
        text += (
            "Samples have different weights: the average of the ranks' means is the global mean "
            "only for equal local batches."
        )
    raise Wrong(text)
