"""What `Strategy.predict` keeps: nothing for a backward pass."""

import pytest
import torch
from traffic import SAMPLES, set_up, world

CASES = {
    "single": 1,
    "split devices=[cpu,cpu]": 1,
    "scratch": 2,
    "fsdp": 2,
    "tp": 2,
    "mesh tp=2": 2,
    "mesh shard=2": 2,
}


@pytest.mark.parametrize("case", CASES)
def test_predictions_have_no_graph_of_the_forward_pass(case, monkeypatch):
    with world(monkeypatch, 0, CASES[case]) as runtime:
        strategy = set_up(case, runtime, "vit", 1)
        assert any(parameter.requires_grad for parameter in strategy.module.parameters())
        outputs = strategy.predict(torch.ones(SAMPLES, *strategy.example.shape[1:]))
        assert outputs.shape[0] == SAMPLES
        assert not outputs.requires_grad
