"""The state of a rank that docs/strategies.md promises, counted on a rank of a fake group.

State is parameters, gradients and momentum, 3 P on one device. Tensors are cut along their first
dimension, of which the first rank has the largest part.
"""

import math

import pytest
import torch
from small_networks import make_model
from traffic import set_up, step, world

from ddp_lab.strategies.dtensor import local

# Of a block of the small ViT: a column layer is divided with its bias, a row layer without it.
DIVIDED = ("q.weight", "q.bias", "k.weight", "k.bias", "v.weight", "v.bias", "proj.weight")
DIVIDED += ("fc1.weight", "fc1.bias", "fc2.weight")


def state_of(monkeypatch: pytest.MonkeyPatch, case: str, ranks: int, name: str = "vit") -> int:
    """Return the elements that the first of some ranks keeps between two steps."""
    with world(monkeypatch, 0, ranks) as runtime:
        strategy = set_up(case, runtime, name, 1)
        parameters = [*strategy.module.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
        step(strategy, 1)
        optimizer.step()
        tensors = [*parameters, *(each.grad for each in parameters)]
        tensors += [optimizer.state[each]["momentum_buffer"] for each in parameters]
        return sum(local(tensor).numel() for tensor in tensors)


def elements(name: str, shards: int = 1, tp: int = 1) -> int:
    """Return the elements of the first rank's part of a model's parameters."""
    total = 0
    for path, parameter in make_model(name, 0).named_parameters():
        size = parameter.numel()
        rows = parameter.shape[0]
        if tp > 1 and path.endswith(DIVIDED):
            size //= tp
            # a row layer is divided along its second dimension
            if not path.endswith(("proj.weight", "fc2.weight")):
                rows //= tp
        total += math.ceil(rows / shards) * size // rows
    return total


def test_scratch_keeps_the_state_of_one_device(monkeypatch):
    assert state_of(monkeypatch, "scratch", 4, "lenet") == 3 * 129_068


@pytest.mark.parametrize(
    ("case", "ranks", "shards"),
    [
        ("fsdp", 4, 4),
        ("fsdp", 8, 8),
        ("mesh shard=1", 8, 1),
        ("mesh shard=null", 8, 8),
        ("mesh shard=4", 8, 4),
    ],
)
def test_sharded_state_is_divided_by_the_number_of_shards(case, ranks, shards, monkeypatch):
    assert state_of(monkeypatch, case, ranks) == 3 * elements("vit", shards)


@pytest.mark.parametrize(
    ("case", "ranks", "shards"),
    [
        pytest.param("tp tp=2", 2, 1, marks=pytest.mark.slow),
        pytest.param("mesh tp=2", 8, 1, marks=pytest.mark.slow),
        ("mesh tp=2 shard=4", 8, 4),
    ],
)
def test_layers_of_a_plan_are_divided_by_tp(case, ranks, shards, monkeypatch):
    expected = 3 * elements("vit", shards, tp=2)
    assert state_of(monkeypatch, case, ranks) == expected < 3 * elements("vit", shards)


def test_stages_of_a_pipeline_keep_the_state_of_their_own_layers(monkeypatch):
    """LeNet is cut after its first block: 20 filters of 3 x 3 with a bias."""
    assert state_of(monkeypatch, "pipeline", 2, "lenet") == 3 * (20 * 3 * 3 + 20)
