"""The weights of a step that is only planned: tensors with shapes and no memory."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ddp_lab.advise.fake import FakeWeights


def never(source: torch.Tensor, target: torch.Tensor) -> None:
    raise AssertionError("a plan has nothing to copy")


@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_weights_stay_tied_in_a_plan(is_tied):
    """Else a plan would count the memory of a shared table twice."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False))
    if is_tied:
        model[2].weight = model[0].weight
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    FakeWeights(mode).fill(model, torch.device("cpu"), never)
    assert (model[2].weight is model[0].weight) == is_tied
    assert len(list(model.parameters())) == (3 if is_tied else 4)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
