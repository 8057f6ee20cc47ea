"""What a trial leaves as it was: counters, schedules and random states."""

import random
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.models.chain import Chain
from ddp_lab.models.kept_state import state_kept

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
STRATEGIES = {
    "scratch": {},
    "ddp": {},
    "fsdp": {},
    "tp": {"tp": None},
    "mesh": {"shard": None},
    "pipeline": {"num_microbatches": 1, "schedule": "gpipe"},
    "ddp_pipeline": {"pp": 2, "num_microbatches": 1, "schedule": "gpipe"},
    "scratch with the key": {"find_unused_parameters": True},
    "ddp with the key": {"find_unused_parameters": True},
    "ddp sync": {"batch_norm": "sync"},
}


class Scheduled(nn.Module):
    """A part whose computation depends on what it remembers, in all the ways that Python offers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0
        self.history = [1.0]
        self.recent = deque([1.0], maxlen=3)
        self.table = {"seen": set[int]()}
        self.average = torch.zeros(())  # no buffer
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, inputs):
        self.calls += 1
        self.history.append(1.0)
        self.recent.append(float(self.calls))
        self.table["seen"].add(self.calls)
        self.average += 1
        drawn = torch.rand((), generator=self.generator).to(inputs)
        factor = (
            len(self.history)
            + sum(self.recent)
            + len(self.table["seen"])
            + float(self.average)
            + drawn
        )
        return self.layer(inputs) / (1 + factor * self.calls)


class Draws(nn.Module):
    """A part that uses the generators of Python and NumPy."""

    def forward(self, inputs):
        return inputs * (1 + random.random() + np.random.rand())


def make_loss():
    """Return a loss with a schedule in the variables of a closure and in an attribute of it."""
    calls = 0

    def loss(outputs, targets):
        nonlocal calls
        calls += 1
        loss.calls += 1
        return (outputs - targets).square().mean(1) / (calls + loss.calls)

    loss.calls = 0
    loss.weighted = False
    return loss


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(*torch.rand(2, 16, 4, generator=generator, dtype=torch.float64))


def chain() -> Chain:
    return Chain(
        (4,),
        first=Scheduled(),
        second=nn.Sequential(nn.Linear(4, 4), Draws()),
        last=nn.Linear(4, 4),
    )


def losses(
    strategy: str, example: bool = True, make=chain, loss=make_loss, **options
) -> list[float]:
    random.seed(5), np.random.seed(5)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Lab(strategy, device="cpu", timeout=30, **options) as lab:
            samples = data()
            model = make()
            keywords = {"example": samples[0]} if example else {}
            trainer = lab.trainer(model, loss(), SGD, batch_size=4, **keywords)
            return [
                trainer.step(*batch).item()
                for epoch in range(2)
                for batch in trainer.batches(samples, epoch)
            ]
    finally:
        torch.set_default_dtype(before)


def on_two() -> dict:
    return {name: losses(name.split()[0], **options) for name, options in STRATEGIES.items()}


@once
def two() -> list[dict]:
    return run_world(2, on_two, timeout=120)


@once
def alone() -> list[float]:
    return losses("single", example=False)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_python_state_of_model_and_loss_is_that_of_one_device_without_a_trial(strategy):
    assert len({round(loss, 6) for loss in alone()}) == 8
    for rank in two():
        assert rank[strategy] == pytest.approx(alone(), rel=1e-12)


def test_trial_of_one_device_leaves_the_state():
    assert losses("single") == alone()
    assert losses("split", num_microbatches=1) == pytest.approx(alone(), rel=1e-12)


class Slotted:
    __slots__ = ("calls", "empty")

    def __init__(self):
        self.calls = 0


class Changing(nn.Module):
    """Changes its weights, in place and by other memory, their gradients and what is trained."""

    def __init__(self):
        super().__init__()
        self.swapped = nn.Linear(2, 2)
        self.written = nn.Linear(2, 2)
        self.slots = Slotted()
        self.plain = random.Random(1)
        self.numbers = np.random.default_rng(1)

    def forward(self, inputs):
        self.slots.calls += 1
        self.plain.random(), self.numbers.random()
        self.swapped.weight.data = self.swapped.weight.data * 2
        self.written.weight.data.mul_(2)
        self.written.requires_grad_(False)
        self.train(False)
        self.other = nn.Linear(2, 2)
        return self.swapped(inputs)


def state_of(model: Changing) -> list:
    values = [value.tolist() for value in model.state_dict().values()]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    places = [parameter.data_ptr() for parameter in model.parameters()]
    generators = (
        model.plain.getstate(),
        model.numbers.bit_generator.state,
        torch.get_rng_state().tolist(),
    )
    gradients = [parameter.grad for parameter in model.parameters()]
    return [values, trained, places, generators, gradients, model.slots.calls, model.training]


@pytest.mark.parametrize("fails", [False, True])
def test_state_is_restored_also_after_an_error(fails):
    model = Changing()
    before = state_of(model)
    with pytest.raises(KeyError) if fails else state_kept(), state_kept(model.forward):
        model(torch.rand(1, 2)).sum().backward()
        assert state_of(model) != before
        if fails:
            raise KeyError
    assert state_of(model) == before


def test_values_of_weights_are_copied_only_where_that_is_wanted():
    model = Changing()
    before = model.written.weight.clone()
    with state_kept(model, weights=False):
        model(torch.rand(1, 2))
    assert torch.equal(model.written.weight, 2 * before)
    assert not hasattr(model, "other")


def test_task_metrics_after_a_trial():
    """The loss of a task of ddp_lab is tried, too."""
    with_example = losses("single", loss=tasks.Regression)
    assert with_example == losses("single", loss=tasks.Regression, example=False)
