"""Every strategy calls the loss that torch.compile may replace, with the outputs of its model.

Compiled, a loss does not write what is converted to float32, which of 50,304 logits a token took
20 ms of the 90 ms of a step of GPT-2.
"""

from functools import partial

import pytest
import torch
from in_bf16 import run_in_bf16
from worlds import once, run_world

from ddp_lab.strategies import base
from ddp_lab.tasks.base import measure

# The stages of a pipeline return the dtype that torch's schedules check.
FAST = {"mesh tp=2 short": torch.bfloat16, "pipeline short": torch.float32}
SLOW = {
    "ddp": torch.bfloat16,
    "scratch": torch.bfloat16,
    "fsdp": torch.bfloat16,
    "tp tp=2": torch.bfloat16,
    "mesh shard=null short": torch.bfloat16,
    "mesh tp=2 sequence_parallel=true short": torch.bfloat16,
    "mesh pp=2 short": torch.float32,
    "ddp_pipeline pp=2 vit": torch.float32,
}
ONE_RANK = {
    "single": torch.bfloat16,
    "split devices=[cpu,cpu] num_microbatches=2": torch.bfloat16,
}


def measured_dtypes(cases: list[str]) -> dict[str, set[torch.dtype]]:
    """Return the dtypes of the outputs of which each case has measured the loss."""
    dtypes: dict[str, set[torch.dtype]] = {}
    for case in cases:
        seen: set[torch.dtype] = set()

        def noting(dtypes_of_case, task, outputs, *arguments):
            dtypes_of_case.add(outputs.dtype)
            return measure(task, outputs, *arguments)

        base.measure = partial(noting, seen)  # as of Strategy.use_compiled
        run_in_bf16([case])
        dtypes[case] = seen
    return dtypes


@once
def world(ranks: int, *cases: str) -> list[dict[str, set[torch.dtype]]]:
    return run_world(ranks, measured_dtypes, list(cases), timeout=200)


@pytest.mark.parametrize(
    ("ranks", "cases", "case"),
    [
        *(pytest.param(2, FAST, case, id=case) for case in FAST),
        *(pytest.param(2, SLOW, case, id=case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(1, ONE_RANK, case, id=case) for case in ONE_RANK),
    ],
)
def test_strategy_calls_the_replaceable_loss_with_outputs_that_are_not_converted(
    ranks, cases, case
):
    of_ranks = [outcome[case] for outcome in world(ranks, *cases)]
    assert set().union(*of_ranks) == {cases[case]}
