"""The trial of a loss finds those over the batch, and only those, for any outputs and targets."""

import random
import threading

import numpy as np
import pytest
import torch
from batch_losses import CLASSES, OVER_BATCH, SUMS
from slow_rows import slow_but
from torch import nn

from ddp_lab import tasks
from ddp_lab.tasks.base import Task
from ddp_lab.tasks.over_batch import copied, describe_coupling, outputs_of

DRAWN = torch.Generator().manual_seed(3)


def classes(*shape: int) -> torch.Tensor:
    return torch.randint(0, CLASSES, shape, generator=DRAWN)


TARGETS = {
    "classes": classes(8),
    "shares": torch.rand(8, CLASSES, generator=DRAWN).softmax(1),
    "masks": classes(8, 4, 4),
    "labels": torch.randint(0, 2, (8, CLASSES), generator=DRAWN).float(),
    "numbers": torch.randn(8, CLASSES, generator=DRAWN),
    "counts": torch.randint(0, 9, (8, CLASSES), generator=DRAWN).float(),
    "times": torch.stack(
        [torch.rand(8, generator=DRAWN), torch.tensor([1.0, 0, 0, 1, 1, 0, 1, 0])], 1
    ),
    "events": torch.tensor([1.0, 0, 0, 1, 1, 0, 1, 0]),
    "signs": torch.tensor([1.0, -1, -1, 1, 1, -1, 1, -1]),
}
SHAPES = {
    "masks": (CLASSES, 4, 4),
    "times": (1,),
    "events": (),
    "signs": (),
}  # of the outputs of a sample


def outputs_for(kind: str, samples: int) -> torch.Tensor:
    """Return outputs from 0 to 1, which every loss takes."""
    shape = SHAPES.get(kind, (CLASSES,))
    return torch.rand(samples, *shape, generator=torch.Generator().manual_seed(1))


# What a trial may begin with: outputs and targets of several samples, those of one, equal ones, and
# shapes alone.
BEGINNINGS = {
    "samples": lambda kind: (outputs_for(kind, 2), TARGETS[kind]),
    "one sample": lambda kind: (outputs_for(kind, 1), TARGETS[kind][:1]),
    "zeros": lambda kind: (
        torch.zeros_like(outputs_for(kind, 2)),
        TARGETS[kind][:1].expand_as(TARGETS[kind]),
    ),
    "shapes": lambda kind: (outputs_for(kind, 2).to("meta"), TARGETS[kind]),
}


@pytest.mark.parametrize("beginning", slow_but(["one sample", "zeros"], BEGINNINGS))
@pytest.mark.parametrize("name", SUMS)
def test_sum_over_samples_is_not_taken_for_a_loss_over_the_batch(name, beginning):
    kind, loss = SUMS[name]
    assert describe_coupling(Task(loss), *BEGINNINGS[beginning](kind)) is None


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("name", OVER_BATCH)
def test_loss_over_the_batch_is_found(name, beginning):
    kind, loss = OVER_BATCH[name]
    coupling = describe_coupling(Task(loss), *BEGINNINGS[beginning](kind))
    assert coupling is not None
    assert coupling.startswith(("is ", "has the weight ", "fails for one sample: "))


def test_reason_names_both_sums_or_the_error_of_one_sample():
    def alike(outputs, targets):
        return outputs[:, 0] * 0 + len(outputs)

    both = describe_coupling(Task(alike), torch.rand(2, 3), torch.rand(8))
    assert both == "is 64 for 8 samples together, and 8 for each alone, in sum"
    failing = describe_coupling(Task(OVER_BATCH["AUC"][1]), *BEGINNINGS["samples"]("events"))
    assert failing is not None
    assert failing.startswith(
        "fails for one sample: ValueError: needs a positive and a negative sample "
        "(batch_losses.py, line"
    )


@pytest.mark.parametrize("beginning", ["samples", "one sample"])
def test_loss_of_complex_targets_is_tried(beginning):
    targets = torch.complex(TARGETS["numbers"], TARGETS["numbers"].flip(0))

    def errors(outputs, targets):
        return (outputs - targets).abs().mean(1)

    def beside_mean(outputs, targets):
        return (outputs - targets - targets.mean(0)).abs().mean(1)

    outputs, _ = BEGINNINGS[beginning]("numbers")
    assert describe_coupling(Task(errors), outputs, targets) is None
    assert describe_coupling(Task(beside_mean), outputs, targets) is not None


OWN = {
    "classification": (tasks.Classification(), "classes"),
    "regression": (tasks.Regression(), "numbers"),
    "multi_label": (tasks.MultiLabel(), "labels"),
    "segmentation": (tasks.Segmentation(), "masks"),
}


@pytest.mark.parametrize("name", OWN)
def test_losses_of_tasks_are_sums_over_samples(name):
    task, kind = OWN[name]
    assert describe_coupling(task, *BEGINNINGS["samples"](kind)) is None


def test_losses_of_tokens_are_a_sum_over_samples_though_they_are_in_float32():
    targets = torch.randint(0, 50, (2, 300), generator=DRAWN)
    targets[0, :100] = -100
    assert (
        describe_coupling(tasks.Tokens(), 30 * torch.randn(2, 300, 50, generator=DRAWN), targets)
        is None
    )


def test_trial_leaves_the_task_the_model_and_the_random_state_as_they_are():
    task = Task(SUMS["counting"][1])
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(5)
    model[1].eval()
    outputs = outputs_of(model, torch.rand(2, 4, generator=DRAWN))
    assert outputs is not None
    describe_coupling(task, outputs, torch.rand(2, 4, generator=DRAWN))
    describe_coupling(
        Task(SUMS["random numbers of Python"][1]), outputs, torch.rand(2, 4, generator=DRAWN)
    )
    drawn = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(drawn[0], expected[0])
    assert drawn[1:] == expected[1:]
    assert task.loss.calls == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_model_that_fails_has_no_outputs():
    assert outputs_of(nn.Linear(3, 4), torch.rand(2, 5)) is None


def test_task_that_cannot_be_copied_is_tried_itself():
    task = tasks.Regression()
    copy_of_it = copied(task)
    assert copy_of_it is not task
    task.lock = threading.Lock()
    assert copied(task) is task
