"""The decay of the averages of the weights, its warm-up, and what a captured update does."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from training import make_step

from ddp_lab.training import counted_averages
from ddp_lab.training.ema import EMA

DECAY = 0.6  # which the warm-up reaches in the 14th update


class Recorded(TorchDispatchMode):
    """Keeps every operation and repeats it on the same tensors, as a CUDA graph does."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        new = {}

        def current(value):
            return new.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for func, args, kwargs, out in self.operations:
            again = func(*tree_map(current, args), **tree_map(current, kwargs))
            for old, value in zip(
                *(x if isinstance(x, (list, tuple)) else [x] for x in (out, again)), strict=True
            ):
                new[id(old)] = value


def model_with(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    return set_all(model, value)


@torch.no_grad()
def set_all(model: nn.Module, value: float) -> nn.Module:
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.fill_(value)
    return model


def averages_of(model: nn.Module, warmup: bool, decay: float = DECAY) -> EMA:
    return EMA(SimpleNamespace(module=model, loss_scale=None), decay, warmup)


def decay_at(update: int) -> float:
    return min(DECAY, (1 + update) / (10 + update))


@pytest.mark.parametrize("most", [1, 2**20], ids=["one by one", "together"])
def test_decay_warms_up_as_in_tensorflow_and_then_stays(most, monkeypatch):
    monkeypatch.setattr(counted_averages, "MOST", most)
    model = model_with(1.0).double()
    expected = 1.0
    average = averages_of(model, warmup=True)
    for update in range(20):
        set_all(model, update)
        average.update()
        expected = decay_at(update) * expected + (1 - decay_at(update)) * update
        for name, averaged in average.averages.items():
            wanted = update if name.endswith("num_batches_tracked") else expected
            torch.testing.assert_close(
                averaged, torch.full_like(averaged, wanted), rtol=1e-6, atol=0
            )
    assert decay_at(12) < decay_at(13) == decay_at(19) == DECAY


def test_decay_without_warmup_is_that_of_torch_to_the_last_digit():
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    average = averages_of(model, warmup=False)
    expected = [each.detach().clone() for each in model.parameters()]
    update = get_ema_multi_avg_fn(DECAY)
    for _ in range(5):
        nn.init.normal_(model.weight)
        average.update()
        update(expected, [each.detach() for each in model.parameters()], None)
    assert all(
        torch.equal(one, other)
        for one, other in zip(average.averages.values(), expected, strict=True)
    )


def test_replayed_update_equals_50_eager_ones():
    """A CUDA graph repeats the operations of one update.

    None may depend on what the host knew at the capture.
    """
    model = model_with(0.0)
    eager = averages_of(model, True, 0.999)
    captured = averages_of(model, True, 0.999)
    before = [tensor.clone() for tensor in captured.state]
    with Recorded() as graph:
        captured.update()
    for tensor, old in zip(captured.state, before, strict=True):
        tensor.copy_(old)
    for number in range(50):
        set_all(model, number)
        eager.update()
        graph.replay()
    assert all(
        torch.equal(eager.averages[name], captured.averages[name]) for name in eager.averages
    )
    assert {count.item() for count in captured.counted.updates.values()} == {50}
    assert not [func for func, *_ in graph.operations if "local_scalar" in str(func)], (
        "the host waits for the device"
    )


def test_step_without_a_gradient_counts_as_an_update_so_that_a_resume_knows_their_number():
    step, loader = make_step("ema=0.999", "on_nan=skip")
    (first, *_) = list(loader)
    broken = first._replace(inputs=torch.full_like(first.inputs, torch.nan))
    step.running_sums.begin(0)
    for batch in (first, broken, first):
        before = copy.deepcopy(step.ema.averages)
        step(batch)
    for name, weight in step.strategy.module.named_parameters():
        third = before[name] * 3 / 12 + weight * 9 / 12
        torch.testing.assert_close(step.ema.averages[name], third)
