"""The buffers of a loss that training changes are part of the state of a training, as BatchNorm's.

They are restored after a skipped step and after a warm-up, and are those of replica 0 in an
evaluation.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from own_losses import Centred, CountingCalls
from torch import nn
from torch.utils.data import TensorDataset
from training import make_step
from worlds import run_world

from ddp_lab import Lab
from ddp_lab.data.batch import Batch
from ddp_lab.models.buffers import set_buffer
from ddp_lab.speed.cuda_graph import warm_up
from ddp_lab.speed.host_state import HostState
from ddp_lab.strategies.split import Split
from ddp_lab.tasks.classification import Classification

CLASSES = 4


def own_loss(name: str) -> list[str]:
    return ["loss=own", f"loss._target_=own_losses.{name}"]


def test_skipped_step_leaves_the_state_of_the_loss():
    step, loader = make_step(*own_loss("Centred"), "on_nan=skip")
    loader.set_epoch(1)
    batch, *_ = loader
    step.compute(batch)
    centre = step.strategy.task.loss.centre
    before = centre.clone()
    assert before.abs().max() > 0
    step.compute(Batch(batch.inputs * float("nan"), batch.targets, batch.global_size))
    assert torch.equal(centre, before)
    step.compute(batch)
    assert centre.isfinite().all()
    assert not torch.equal(centre, before)


@pytest.mark.parametrize("loss", ["Centred", "Replacing"])
def test_warm_up_leaves_the_state_of_the_loss(loss):
    step, loader = make_step(*own_loss(loss))
    loader.set_epoch(1)
    batch, *_ = loader
    step.compute(batch)
    trained = step.strategy.task.loss
    buffer = trained.centre
    before = buffer.clone()
    calls = getattr(trained, "calls", None)
    warm_up(step, lambda: batch, 3)
    assert trained.centre is buffer, "a graph reads it where it was"
    assert torch.equal(buffer, before)
    assert getattr(trained, "calls", None) == calls


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_calls_the_loss_once_for_each_micro_batch(accumulate):
    """The accuracy of the training has the weights of the losses, for which it is not called."""
    step, loader = make_step(f"accumulate={accumulate}")
    task = Classification(CountingCalls())
    step.strategy.task = task
    loader.set_epoch(1)
    step.strategy.train()
    batch, *_ = loader
    step.running_sums.begin(0)
    step.compute(batch)
    assert int(task.loss.calls) == accumulate
    weights = 1.0 + batch.targets
    _, right, weight = step.running_sums.totals.tolist()
    assert weight == weights.sum()
    assert 0 < right < weight
    assert task._kept is None, "the outputs of a batch must not be kept"


class Growing(Centred):
    """Keeps the means of its batches, of which there are none at first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("means", None)

    def forward(self, logits, targets):
        losses = super().forward(logits, targets)
        mean = logits.detach().mean().unsqueeze(0)
        self.means = mean if self.means is None else torch.cat([self.means, mean])
        return losses


def test_warm_up_leaves_a_buffer_without_a_value():
    step, loader = make_step()
    loss = Growing()
    step.strategy.task = Classification(loss)
    loader.set_epoch(1)
    batch, *_ = loader
    warm_up(step, lambda: batch, 2)
    assert loss.means is None


class Table(nn.Module):
    """A layer that makes tables in its first pass, in the ways that models do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", None, persistent=False)
        self.cache = None

    def forward(self, inputs):
        if self.mask is None:
            self.mask = torch.ones(())
        if not hasattr(self, "ones"):
            self.register_buffer("ones", torch.ones(()), persistent=False)
        if self.cache is None:
            self.cache = torch.ones(())
        return inputs * self.mask * self.ones * self.cache


def test_warm_up_leaves_tables_that_the_first_pass_has_made():
    """They are no state: a pass would make them again, or not find them."""
    step, loader = make_step("on_nan=skip")
    table = Table()
    model = nn.Sequential(table, step.strategy.module)
    step.strategy.module = model
    step.strategy.forward = model
    loader.set_epoch(1)
    batch, *_ = loader
    warm_up(step, lambda: batch, 2)
    assert table.cache is not None
    assert table.mask is not None
    before = HostState.of(step.strategy)
    step.compute(Batch(batch.inputs * float("nan"), batch.targets, batch.global_size))
    step.compute(batch)
    assert before.difference(HostState.of(step.strategy)) == ""
    assert table.mask is not None


class Numbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.lowest = float("nan")
        self.register_buffer("expanded", torch.ones(1).expand(10))

    def forward(self, logits, targets):
        return F.cross_entropy(logits * self.expanded, targets, reduction="none")


def test_nan_in_an_attribute_and_an_expanded_buffer_are_no_change():
    step, loader = make_step("on_nan=skip")
    task = Classification(Numbers())
    step.strategy.place(step.strategy.module, task)
    loader.set_epoch(1)
    batch, *_ = loader
    before = HostState.of(step.strategy)
    warm_up(step, lambda: batch, 2)
    assert before.difference(HostState.of(step.strategy)) == ""


class Weighing(Classification):
    """A task that overrides the checked losses, and so their weights."""

    def losses(self, outputs, targets):
        return super().losses(outputs, targets), 1.0 + targets.to(outputs.dtype)


def test_metrics_have_the_weights_of_a_task_that_overrides_the_losses():
    step, loader = make_step()
    step.strategy.task = Weighing(partial(F.cross_entropy, reduction="none"))
    loader.set_epoch(1)
    batch, *_ = loader
    step.running_sums.begin(0)
    logits = step.strategy.predict(batch.inputs)
    step.compute(batch)
    _, right, weight = step.running_sums.totals.tolist()
    weights = 1.0 + batch.targets
    assert weight == weights.sum()
    assert right == weights[logits.argmax(1) == batch.targets].sum()


def test_losses_of_torch_without_weights_have_no_state():
    assert not Classification(nn.CrossEntropyLoss(reduction="none")).has_buffers
    weighted = nn.CrossEntropyLoss(torch.ones(10), reduction="none")
    assert Classification(weighted).has_buffers
    assert Classification(Growing()).has_buffers


def test_skipped_step_leaves_a_buffer_that_grows():
    step, loader = make_step("on_nan=skip")
    loss = Growing()
    step.strategy.task = Classification(loss)
    loader.set_epoch(1)
    batch, *_ = loader
    broken = Batch(batch.inputs * float("nan"), batch.targets, batch.global_size)
    step.compute(broken)
    assert loss.means is None
    step.compute(batch)
    step.compute(broken)
    assert len(loss.means) == 1
    assert loss.means.isfinite().all()


def train(strategy: str, **options) -> tuple[float, float, list[float]]:
    """Return the loss of an evaluation, the same by hand, and the state of the loss."""
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(
        torch.rand(20, 6, generator=generator),
        torch.randint(CLASSES, (20,), generator=generator),
    )
    with Lab(strategy, device="cpu", timeout=30, **options) as lab:
        loss = Centred(CLASSES)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        make = partial(torch.optim.SGD, lr=0.1)
        trainer = lab.trainer(
            model, loss, make, batch_size=8, example=data[0], loss_over_batch=True
        )
        for batch in trainer.batches(data, 0):
            trainer.step(*batch)
        evaluated = trainer.evaluate(data)["loss"]
        inputs, targets = data.tensors
        state = trainer.strategy.task_of_steps.get_buffer("loss.centre")
        logits = trainer.predict(inputs)
        by_hand = F.cross_entropy(logits - state, targets).item()
        return evaluated, by_hand, state.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_replicas_evaluate_with_the_state_of_replica_0(strategy):
    (evaluated, by_hand, state), (_, _, other) = run_world(2, train, strategy, timeout=60)
    assert state == other
    assert evaluated == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize("last", ["cpu", "cpu:0"])
def test_split_evaluates_and_saves_the_state_that_its_steps_have_changed(last, monkeypatch):
    """Another name of the device stands for another device, which has a copy of the loss."""
    monkeypatch.setattr(Split, "device_of_loss", property(lambda self: torch.device(last)))
    evaluated, by_hand, state = train("split", devices=["cpu", "cpu"], num_microbatches=1)
    assert max(map(abs, state)) > 0.01
    assert evaluated == pytest.approx(by_hand, abs=1e-6)
    _, _, alone = train("single")
    assert state == pytest.approx(alone, abs=1e-6)


def grow(rank: int) -> tuple[list[float], list[float]]:
    """Return the buffers after an evaluation has begun, of which each rank has more than before."""
    with Lab("ddp", device="cpu", timeout=30) as lab:
        loss = Centred(CLASSES)
        loss.register_buffer("queue", None)
        loss.register_buffer("kept", torch.ones(2))
        data = TensorDataset(torch.rand(8, 6), torch.randint(CLASSES, (8,)))
        trainer = lab.trainer(
            nn.Linear(6, CLASSES),
            loss,
            partial(torch.optim.SGD, lr=0.1),
            batch_size=8,
            loss_over_batch=True,
        )
        task = trainer.strategy.task
        set_buffer(task, "loss.queue", torch.arange(3.0 + lab.rank))
        set_buffer(task, "loss.kept", torch.full((2,), 5.0 + lab.rank))
        trainer.evaluate(data)
        return task.loss.queue.tolist(), task.loss.kept.tolist()


@pytest.mark.slow
def test_buffers_of_other_shapes_on_other_ranks_become_those_of_rank_0():
    assert run_world(2, grow, 0, timeout=60) == [([0.0, 1.0, 2.0], [5.0, 5.0])] * 2
