"""Models with many parameters are tried without data, also where they ask for values first."""

from functools import partial

import pytest
import torch
from case import Case
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ddp_lab.models import trial
from ddp_lab.models.random_draws import draws_at_random
from ddp_lab.models.trial import Trial, check_logits, freeze_unused, random_like
from ddp_lab.models.usage import find_usage
from ddp_lab.observe import log
from ddp_lab.run.build import build
from ddp_lab.strategies.batch_trial import changing_buffer
from ddp_lab.world.runtime import Runtime

PASSES: list[str] = []  # what the forward passes of Asking had as weights


class Asking(nn.Module):
    """A model that fails on the meta device, as those of transformers do where they read a mask.

    Args:
        changes: whether a forward pass changes the buffer.
    """

    def __init__(self, changes: bool = False):
        super().__init__()
        self.entry = nn.Linear(784, 4)
        self.spare = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10)
        self.changes = changes
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, images):
        is_fake = isinstance(self.entry.weight, FakeTensor)
        PASSES.append("fake" if is_fake else images.device.type)
        if images.is_meta:
            raise RuntimeError("there are no values")
        hidden = self.entry(images.flatten(1))
        if self.changes:
            self.mean.add_(hidden.detach().mean(0))
        return self.head(hidden)


@pytest.fixture(autouse=True)
def large(monkeypatch):
    monkeypatch.setattr(trial, "LARGE", 0)
    PASSES.clear()


EXAMPLE = torch.empty(2, 1, 28, 28, device="meta")


def test_unused_parameters_are_found_without_data():
    images = random_like(torch.zeros(2, 1, 28, 28))
    attempt = Trial(images, partial(check_logits, classes=10))
    model = Asking()
    unused, _ = freeze_unused(model, attempt, Runtime("cpu"), "model._target_=net")
    assert unused == {"spare.weight", "spare.bias"}
    assert {*PASSES} == {"meta", "fake"}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_logits_of_a_wrong_shape_are_refused_with_the_reason():
    attempt = Trial(torch.zeros(2, 1, 28, 28), partial(check_logits, classes=3))
    with pytest.raises(trial.ConfigError, match=r"must return logits of shape \[2, 3\]"):
        freeze_unused(Asking(), attempt, Runtime("cpu"), "model._target_=net")


def test_usage_is_found_without_data():
    usage = find_usage(Asking(), EXAMPLE)
    assert usage is not None
    assert usage.called == {"", "entry", "head"}
    assert {*PASSES} == {"meta", "fake"}


def test_draws_are_found_without_data():
    model = nn.Sequential(Asking(), nn.Dropout(0.5))
    assert draws_at_random(model, EXAMPLE)
    assert not draws_at_random(Asking(), EXAMPLE)
    assert {*PASSES} == {"meta", "fake"}


@pytest.mark.parametrize("changes", [False, True])
def test_buffer_that_a_pass_changes_is_found_by_values_only_if_it_is_written(changes):
    model = Asking(changes)
    expected = "mean" if changes else None
    assert changing_buffer(model, EXAMPLE) == expected
    assert {*PASSES} == ({"fake", "cpu"} if changes else {"fake"})
    assert torch.equal(model.mean, torch.zeros(4))


class Told(log.Activities):
    """Logs every activity when it begins, as if all took long."""

    def begin(self, activity: log.Activity) -> None:
        activity.tell(f"{activity.name} ...")


def test_what_takes_time_before_the_log_begins_is_printed(monkeypatch, capsys):
    """Each part of the construction says what it waits for."""
    monkeypatch.setattr(log, "activities", Told())
    build(Case.of("fsdp own=Plain").config(), Runtime("cpu"))
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "preparing the data: downloading or reading ...",
        "making the model: drawing or reading its weights ...",
        "trying the model: a step of two samples ...",
        "strategy=fsdp: dividing the model ...",
    ):
        assert line in lines
