"""The losses of tasks: label smoothing, mixed targets, losses of users, and misfits."""

import pytest
import torch
import torch.nn.functional as F
from own_losses import Focal

from ddp_lab.config.errors import ConfigError, TrainingError
from ddp_lab.run.build_model import build_loss
from ddp_lab.tasks.base import RENAMED, Task, measure
from ddp_lab.tasks.classification import Classification, CrossEntropy

LOGITS = torch.randn(6, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.tensor([3, 1, 9, 0, 5, 5])
REAL = 4  # samples; the others are padding
MIXED = (3 * F.one_hot(TARGETS, 10) + F.one_hot(TARGETS.roll(1), 10)).double() / 4


def user_loss(name: str, mixed: bool = False, **options):
    return build_loss({"_target_": f"own_losses.{name}", **options}, 10, mixed)


def loss_of(
    task: Task, targets: torch.Tensor = TARGETS, logits: torch.Tensor = LOGITS
) -> torch.Tensor:
    """Return the summed loss of the samples that are no padding."""
    return measure(task, logits, targets, REAL, divisor=1.0)[0]


def test_own_loss_of_class_indices_refuses_mixed_targets():
    message = (
        r"loss\._target_=own_losses.Focal: does not support mixup and cutmix, .* it failed: "
        "RuntimeError: gather"
    )
    with pytest.raises(ConfigError, match=message):
        user_loss("Focal", mixed=True)


def test_own_losses_are_built_without_reduction_and_summed_without_padding():
    losses = Focal(gamma=3.0, reduction="none")(LOGITS[:REAL], TARGETS[:REAL])
    torch.testing.assert_close(loss_of(Classification(user_loss("Focal", gamma=3.0))), losses.sum())
    expected = 3 * F.cross_entropy(LOGITS[:REAL], TARGETS[:REAL], reduction="sum")
    torch.testing.assert_close(loss_of(Classification(user_loss("scaled", scale=3.0))), expected)
    mixed = loss_of(Classification(user_loss("scaled", mixed=True, scale=1.0)), MIXED)
    torch.testing.assert_close(mixed, loss_of(Classification(), MIXED))


def test_loss_of_padding_alone_is_zero_and_has_a_gradient():
    logits = LOGITS.clone().requires_grad_()
    for loss in (CrossEntropy(0.1), user_loss("Focal")):
        total, _ = measure(Classification(loss), logits, TARGETS, 0, 1.0)
        total.backward()
        assert total == 0
        assert logits.grad.abs().max() == 0


def test_outputs_in_bf16_are_summed_in_float32():
    logits = LOGITS.bfloat16()
    for loss in (CrossEntropy(), user_loss("Focal")):
        task = Classification(loss)
        assert loss_of(task, logits=logits) == loss_of(task, logits=logits.float())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "wrong mean",
            r"must return a loss per sample, .* for b=2 it returned a tensor of shape \[\]. Do not "
            "reduce",
        ),
        ("wrong detached", "it returned a tensor without a gradient"),
        ("wrong number", "for b=2 it returned float"),
        ("wrong failing", r"for b=2 it failed: KeyError: 'weights' \(own_losses.py, line \d+\)$"),
        (
            "Unfinished",
            r"cannot be constructed: AttributeError: .*'missing' \(own_losses.py, line \d+\)$",
        ),
        ("Trained", "has the parameter scale, which no optimizer would train"),
    ],
)
def test_own_loss_that_does_not_fit_is_refused(name, message):
    name, *how = name.split()
    with pytest.raises(ConfigError, match=rf"loss\._target_=own_losses\.{name}: .*{message}"):
        user_loss(name, **{"how": how[0]} if how else {})


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_task_of_a_user_that_defines_a_former_name_is_refused_with_the_new_one(old, new):
    kind = type("Mine", (Classification,), {old: None})
    derived = type("Derived", (kind,), {})
    message = rf"^Derived: defines {old}, which a task calls {new}; rename it$"
    with pytest.raises(ConfigError, match=message):
        derived()


def test_task_without_a_loss_is_refused():
    with pytest.raises(
        TrainingError,
        match=r"^Task: has no loss; define its method loss_fn, or use Task\(loss\)$",
    ):
        Task().loss_sum(LOGITS, TARGETS)
