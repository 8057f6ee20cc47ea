"""Check of overlap."""

from types import ModuleType

import torch.distributed as dist
from torch import nn

from ddp_lab.config.errors import count
from ddp_lab.exercises.explain import Call, Wrong, contribution, describe_sum

WRITE = ("Overlap.__init__", "Overlap.start", "Overlap.finish")
RANKS = (2, 3)
HINTS = (
    "parameter.register_post_accumulate_grad_hook(function) calls function(parameter) when "
    "parameter.grad is complete.",
    "dist.all_reduce(tensor, async_op=True) returns at once, with a Work whose wait() ends when "
    "the sum is there.",
    "Keep the works in a list, wait for each in finish(), and empty the list: there is a next "
    "step.",
)


def check(theirs: ModuleType, calls: list[Call]) -> None:
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).double()
    for layer in model.children():
        nn.init.ones_(layer.get_parameter("weight"))
        nn.init.zeros_(layer.get_parameter("bias"))

    overlap = theirs.Overlap(model)
    for step in (1, 2):
        model.zero_grad()
        before = len(calls)
        outputs = model(contribution(0, [1, 1]))  # of an input 1, so that each layer returns 1
        # all gradients are the contribution
        (outputs * contribution(rank, [1, 1])).sum().backward()
        during = calls[before:]
        sums = [call for call in during if call.name == "all_reduce"]
        if not sums:
            raise Wrong(
                f"Step {step}: no all_reduce was started during the backward pass: a hook on each "
                "parameter starts it."
            )

        if not all(call.async_op for call in sums):
            text = (
                f"Line {sums[0].line} waits for each sum before the backward pass continues, so "
                "nothing overlaps: "
            )
            raise Wrong(text + "async_op=True.")

        if any(call.name == "wait" for call in during):
            raise Wrong(
                "A hook waits for its sum, so the backward pass stops until it is there: wait in "
                "finish()."
            )
        if len(sums) != 4:
            raise Wrong(
                f"Step {step}: the backward pass started {count(len(sums), 'all-reduce')}: "
                "expected 4, one per parameter."
            )

        before = len(calls)
        overlap.finish()
        waits = len([call for call in calls[before:] if call.name == "wait"])
        if waits < 4:
            text = f"Step {step}: finish() waited for {waits} of 4 sums. "
            raise Wrong(text + "A sum that nobody waits for may arrive after the optimizer's step.")

        if waits > 4:
            raise Wrong(
                f"Step {step}: finish() waited {waits} times for 4 sums: those of the last step "
                "are still in the list."
            )
        for name, parameter in model.named_parameters():
            explain(name, parameter, step, rank, ranks)


def explain(name: str, parameter: nn.Parameter, step: int, rank: int, ranks: int) -> None:
    """Raise an error if the gradient of a parameter is not the sum over the ranks."""
    value = 0.0 if parameter.grad is None else float(parameter.grad)
    content = describe_sum(value, ranks)
    if content != "the sum of all ranks":
        text = (
            f"Step {step}: the gradient of {name} on rank {rank} holds {content}, not the sum of "
            "all ranks. "
        )
        raise Wrong(text + "Is it parameter.grad that is summed, when it is complete, and once?")
