"""Check of accumulate against one device that computes the global batch at once."""

from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.config.errors import count
from ddp_lab.exercises.explain import Call, Wrong

WRITE = ("accumulated_step",)
RANKS = (2, 3)
HINTS = (
    "backward() adds to parameter.grad: two calls leave the sum of both gradients there.",
    "The divisor is the size of the global batch for every micro-batch (exercise average_or_sum).",
    "zero_grad, all backward passes, then one all_reduce for each parameter.",
)
MICRO_BATCHES = 3


def check(theirs: ModuleType, calls: list[Call]) -> None:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    # The values of micro-batch m of rank r are digits, so that a wrong gradient shows which ones it
    # contains.
    batches = [
        [torch.full((2, 2), 10.0 ** (MICRO_BATCHES * r + m)).double() for m in range(MICRO_BATCHES)]
        for r in range(ranks)
    ]
    samples = 2 * MICRO_BATCHES * ranks

    for step in (1, 2):
        before = len(calls)
        theirs.accumulated_step(model, batches[rank], samples)
        gradient = model.weight.grad
        if gradient is None:
            raise Wrong(
                f"Step {step}: the weight of rank {rank} has no gradient; is zero_grad called "
                "after the backward passes?"
            )

        for value in gradient.flatten().tolist():
            explain(round(value * samples / 2), step, rank, ranks)
        explain_bias(model.bias.grad, samples, step, rank)
        collectives = len([call for call in calls[before:] if call.name == "all_reduce"])
        if collectives > 2:
            text = (
                f"The gradients are right, but took {collectives} all-reduces for {MICRO_BATCHES} "
                "micro-batches: "
            )
            raise Wrong(
                text + "expected at most 2, one for each parameter after the last micro-batch."
            )


def explain_bias(gradient: torch.Tensor | None, samples: int, step: int, rank: int) -> None:
    """Raise an error if the gradient of the bias, with 1 / samples from each, is not 1."""
    counted = 0 if gradient is None else round(float(gradient) * samples)
    if counted != samples:
        text = (
            f"Step {step}: the weight is right, but the gradient of the bias on rank {rank} is "
            "that of "
        )
        text += f"{count(counted, 'sample')}, expected {samples}. "
        raise Wrong(text + "Accumulate and sum the gradient of every parameter.")


def explain(total: int, step: int, rank: int, ranks: int) -> None:
    """Raise an error about a sum of digits, of which each should be 1."""
    times = [total // 10**each % 10 for each in range(MICRO_BATCHES * ranks)]
    own_batches = slice(MICRO_BATCHES * rank, MICRO_BATCHES * (rank + 1))
    if total == sum(10**each for each in range(MICRO_BATCHES * ranks)):
        return

    table = "; ".join(
        f"rank {r}: {times[MICRO_BATCHES * r : MICRO_BATCHES * (r + 1)]}" for r in range(ranks)
    )
    text = (
        f"Step {step}: the gradient on rank {rank} contains the micro-batches so often ({table}); "
        "expected each once. "
    )
    if set(times[own_batches]) == {1} and sum(times) == MICRO_BATCHES:
        text += "Only the rank's own: the gradients are not summed over the ranks."
    elif step == 2:
        text += "The gradients of the step before are still there: zero_grad at the beginning."
    elif all(
        times[each] == (each % MICRO_BATCHES == MICRO_BATCHES - 1) for each in range(len(times))
    ):
        text += "Only the last micro-batch: zero_grad removes the earlier ones."
    elif set(times) == {MICRO_BATCHES}:
        text += (
            "Each micro-batch was divided by its share of the batch: divide by the size of the "
            "global batch."
        )
    elif max(times) > 1:
        text += (
            "Earlier micro-batches count again: what an all-reduce has summed is summed once more "
            "by the next one."
        )
    raise Wrong(text)
