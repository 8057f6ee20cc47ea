"""Short training runs with precision=bf16, on the CPU too, to compare their rounding errors."""

import math

import pytest
import torch
from case import Case
from training import Outcome, run_case

from ddp_lab.world.runtime import Runtime

CHUNKS = "task.head_chunks=5"
# of language models, with chunks of unequal sizes
SETTINGS = ("tokens accumulate=3", "one_left clipped", "tied_head accumulate=2")


def run_in_bf16(cases: list[str], device: str = "cpu") -> dict[str, Outcome]:
    """Train the cases in this rank's world with precision=bf16."""
    torch.backends.cudnn.enabled = False
    with Runtime(device, "bf16", timeout=30) as runtime:
        if runtime.world_size > 1:
            runtime.open_group()
        outcomes = {}
        for case in cases:
            with Case.of(case).default_dtype():
                outcomes[case] = run_case(runtime, case)
        return outcomes


def assert_chunks_round_no_more(chunked: Outcome, whole: Outcome, exact: Outcome) -> None:
    """Compare a training in bf16 whose head computes losses in chunks with one without chunks.

    Both differ from a training in float32, because they round. Chunks round what the others round,
    but not the sum over the chunks of the weight's gradient, so the distance of all weights from
    those in float32 may not grow. On two cores (torch 2.15, 2026-11-28) it was 0.98 to 1.02 of that
    without chunks.

    The same logits are rounded in both, in products that may be added in another order. So a logit
    differs by at most the distance of two numbers of bf16, and a loss by twice as much.
    """
    error = distance(whole, exact)
    assert error > 0, "nothing was rounded"
    assert distance(chunked, exact) < 1.1 * error
    largest_change = 2 * torch.finfo(torch.bfloat16).eps * largest_logit(exact)
    for sums, expected in zip(chunked.sums, whole.sums, strict=True):
        loss, tokens = sums
        expected_loss, expected_tokens = expected
        assert tokens == expected_tokens
        assert loss / tokens == pytest.approx(expected_loss / tokens, abs=largest_change)


def distance(one: Outcome, other: Outcome) -> float:
    """Return the norm of the difference of all weights."""
    assert one.weights.keys() == other.weights.keys()
    squares = [
        (weight.double() - other.weights[name].double()).square().sum().item()
        for name, weight in one.weights.items()
    ]
    return math.sqrt(sum(squares))


def largest_logit(outcome: Outcome) -> float:
    """Return a bound of the logits of model=gpt, by the inequality of Cauchy and Schwarz."""
    weight = outcome.weights["head.linear.weight"]
    width = weight.size(1)
    gain = outcome.weights["head.norm.weight"].abs().max().item()
    bias = outcome.weights["head.norm.bias"].norm().item()
    largest_row = weight.norm(dim=1).max().item()
    return (gain * math.sqrt(width) + bias) * largest_row
