"""A head that is tied to the embedding, in blocks and stages of their own.

The matrix (test_equivalence.py) compares more strategies with `single`.
"""

import pytest
import torch
from case import reference_of
from training import largest_difference, run_cases
from worlds import once, run_world

from ddp_lab.models.gpt import gpt

ONE = "embed.tokens.weight"
OTHER = "head.linear.weight"
CASES = [
    "fsdp tied_head accumulate=2",
    "pipeline tied_head accumulate=2",
    "mesh pp=2 tied_head accumulate=2",
    "mesh tp=2 sequence_parallel=true tied_head model.init=default",
]


@once
def on_two_ranks():
    return run_world(2, run_cases, CASES, timeout=200)[0]


@once
def alone():
    return run_world(1, run_cases, [reference_of(case) for case in CASES], timeout=200)[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tied_head_equals_single_and_stays_the_embedding(case):
    trained = on_two_ranks()[case]
    single = alone()[reference_of(case)]
    assert torch.equal(trained.weights[ONE], trained.weights[OTHER])
    assert largest_difference(trained.weights, single.weights) < 1e-7
    assert largest_difference(trained.averages, single.averages) < 1e-7
    assert trained.momentum.keys() == single.momentum.keys()
    assert OTHER not in trained.momentum


@pytest.mark.parametrize(("tokens", "parameters"), [(50_257, 124_439_808), (50_304, 124_475_904)])
def test_tied_gpt2_has_the_parameters_of_gpt2(tokens, parameters):
    with torch.device("meta"):
        model = gpt(tokens, context=1024, depth=12, width=768, heads=12, tied=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
