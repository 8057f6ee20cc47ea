"""The running sums of a training step, and its optimizer's state after a change of the memory format."""

import pytest
import torch
from steps import make_step

from ddp_lab.training.metrics import LONGEST, RunningSums
from ddp_lab.training.optimizer import match_strides


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("start", [0, 7, LONGEST - 3])
def test_tally_returns_the_first_step_that_is_not_finite(start, in_graph):
    running_sums = RunningSums(torch.device("cpu"))
    running_sums.in_graph = in_graph
    running_sums.begin(start)
    for step in range(1, 11):
        running_sums.add(torch.tensor([float("nan") if step in (5, 8) else 1.0, 1.0, 1.0], dtype=torch.float64))
    assert running_sums.first_bad(start + 10).item() == start + 5
    running_sums.add(torch.ones(3, dtype=torch.float64))
    assert running_sums.first_bad(start + 11).item() == float("inf")


def test_momentum_of_another_memory_format_gets_the_strides_of_the_weights():
    step, loader = make_step()
    step(next(iter(loader)))
    weight = next(parameter for parameter in step.strategy.parameters() if parameter.dim() == 4)
    state = step.optimizer.state[weight]
    before = state["momentum_buffer"].clone()
    assert before.abs().max() > 0
    state["momentum_buffer"] = before.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    match_strides(step.optimizer)
    assert state["momentum_buffer"].stride() == weight.stride()
    assert torch.equal(state["momentum_buffer"], before)
