"""Check of overlap."""

from types import ModuleType

import torch.distributed as dist
from torch import nn

from ddp_lab.exercises.explain import Call, Wrong, contribution, describe_sum

WRITE = ("Overlap.__init__", "Overlap.start", "Overlap.finish")
RANKS = (2, 3)
HINTS = (
    "parameter.register_post_accumulate_grad_hook(function) calls function(parameter) when parameter.grad is complete.",
    "dist.all_reduce(tensor, async_op=True) returns at once, with a Work whose wait() ends when the sum is there.",
    "Keep the works in a list, wait for each in finish(), and empty the list: there is a next step.",
)


def check(theirs: ModuleType, calls: list[Call]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).double()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    overlap = theirs.Overlap(model)
    for step in (1, 2):
        model.zero_grad()
        before = len(calls)
        model(contribution(rank, [1, 1]) - 1).sum().backward()  # the gradient of the last weight is the contribution
        during = calls[before:]
        sums = [call for call in during if call.name == "all_reduce"]
        if not sums:
            raise Wrong(f"Step {step}: no all_reduce was started during the backward pass: a hook on each parameter starts it.")
        if not all(call.async_op for call in sums):
            text = f"Line {sums[0].line} waits for each sum before the backward pass continues, so nothing overlaps: "
            raise Wrong(text + "async_op=True.")
        if any(call.name == "wait" for call in during):
            raise Wrong("A hook waits for its sum, so the backward pass stops until it is there: wait in finish().")
        if len(sums) != 4:
            raise Wrong(
                f"Step {step}: {len(sums)} all-reduces were started during the backward pass: expected 4, one per parameter."
            )
        before = len(calls)
        overlap.finish()
        waits = len([call for call in calls[before:] if call.name == "wait"])
        if waits < 4:
            text = f"Step {step}: finish() waited for {waits} of 4 sums. "
            raise Wrong(text + "A sum that nobody waits for may arrive after the optimizer's step.")
        if waits > 4:
            raise Wrong(f"Step {step}: finish() waited {waits} times for 4 sums: those of the last step are still in the list.")
        explain(model, step, rank, ranks)


def explain(model: nn.Module, step: int, rank: int, ranks: int) -> None:
    """Raise an error if the gradient of the last weight is not the sum over the ranks."""
    gradient = model.get_parameter("1.weight").grad
    value = 0.0 if gradient is None else float(gradient)
    if describe_sum(value, ranks) != "the sum of all ranks":
        text = (
            f"Step {step}: the gradient of the last weight on rank {rank} holds {describe_sum(value, ranks)}, not the sum of "
        )
        raise Wrong(text + "all ranks. Is it parameter.grad that is summed, when it is complete, and once?")
