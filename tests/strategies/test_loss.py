"""The training loss: sums without padding, label smoothing, and losses of the user's (`loss=own`)."""

import pytest
import torch
import torch.nn.functional as F
from configs import config
from own_losses import Focal

from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.data.batch import IGNORE
from ddp_lab.strategies.loss import CrossEntropy, build_loss, sums

LOGITS = torch.randn(6, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.tensor([3, 1, IGNORE, 9, IGNORE, 0])
REAL = TARGETS != IGNORE


def own(name: str, mixed: bool = False, **options):
    return build_loss({"_target_": f"own_losses.{name}", **options}, 10, mixed)


def test_label_smoothing_mixes_the_target_with_all_classes_but_in_the_test_loss():
    wanted = 0.8 * F.one_hot(TARGETS[REAL], 10) + 0.2 / 10
    expected = -(wanted * LOGITS[REAL].log_softmax(1)).sum()
    torch.testing.assert_close(CrossEntropy(0.2)(LOGITS, TARGETS), expected)
    assert CrossEntropy(0.2).eval()(LOGITS, TARGETS) == F.cross_entropy(LOGITS[REAL], TARGETS[REAL], reduction="sum")


def mixed_targets() -> torch.Tensor:
    """Return the targets in the form of mixed ones: probabilities that are all 0 for padding."""
    targets = torch.zeros(6, 10, dtype=torch.float64)
    targets[REAL] = (3 * F.one_hot(TARGETS[REAL], 10) + F.one_hot(TARGETS[REAL].roll(1), 10)).double() / 4
    return targets


def test_mixed_targets_are_smoothed_and_padding_does_not_count():
    targets = mixed_targets()
    wanted = (0.8 * targets + 0.2 / 10)[REAL]
    expected = -(wanted * LOGITS[REAL].log_softmax(1)).sum()
    torch.testing.assert_close(CrossEntropy(0.2)(LOGITS, targets), expected)
    torch.testing.assert_close(own("scaled", mixed=True, scale=1.0)(LOGITS, targets), CrossEntropy()(LOGITS, targets))


def test_sums_of_mixed_targets_count_the_most_probable_class():
    assert sums(torch.zeros(()), LOGITS, mixed_targets()).tolist() == sums(torch.zeros(()), LOGITS, TARGETS).tolist()
    assert sums(torch.zeros(()), mixed_targets(), mixed_targets()).tolist() == [0, 4, 4]


def test_own_class_and_own_function_ignore_padding():
    losses = Focal(gamma=3.0, reduction="none")(LOGITS[REAL], TARGETS[REAL])
    torch.testing.assert_close(own("Focal", gamma=3.0)(LOGITS, TARGETS), losses.sum())
    expected = 3 * F.cross_entropy(LOGITS[REAL], TARGETS[REAL], reduction="sum")
    torch.testing.assert_close(own("scaled", scale=3.0)(LOGITS, TARGETS), expected)


def test_loss_of_padding_alone_is_zero_and_has_a_gradient():
    logits = LOGITS.clone().requires_grad_()
    for loss in (CrossEntropy(0.1), own("Focal")):
        total = loss(logits, torch.full((6,), IGNORE))
        total.backward()
        assert total == 0
        assert logits.grad.abs().max() == 0


def test_logits_in_bf16_are_summed_in_float32():
    logits = LOGITS.bfloat16()
    for loss in (CrossEntropy(), own("Focal")):
        assert loss(logits, TARGETS) == loss(logits.float(), TARGETS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", r"must return a loss per sample, \[b\], and not reduce them. For b=2 it returned \[\]"),
        ("detached", "For b=2 it returned a tensor without a gradient"),
        ("number", "For b=2 it returned float"),
        ("failing", r"For b=2 it failed: KeyError: 'weights' \(own_losses.py, line \d+\)$"),
        ("Unfinished", r"cannot be constructed: AttributeError: .*'missing' \(own_losses.py, line \d+\)$"),
        ("Trained", "has the parameter scale, which no optimizer would train"),
    ],
)
def test_own_loss_that_does_not_fit_is_refused(name, message):
    with pytest.raises(ConfigError, match=rf"loss\._target_=own_losses\.{name}: .*{message}"):
        own(name)


def test_own_loss_of_class_indices_refuses_mixed_targets():
    message = r"loss\._target_=own_losses.Focal: does not support mixup and cutmix, .* it failed: RuntimeError: gather"
    with pytest.raises(ConfigError, match=message):
        own("Focal", mixed=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"loss\._target_: is missing; it must be the name of a class"),
        (["loss._target_=own_losses.Focal", "+loss.gama=1"], "loss.gama=1: there is no such key; did you mean loss.gamma"),
        (["loss._target_=own_losses.scaled", "+loss.scale=big"], "loss.scale=big: must be a number"),
        (["loss._target_=own_losses.Focal", "+loss.reduction=sum"], "loss.reduction=sum: there is no such key"),
    ],
)
def test_wrong_options_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(config("loss=own", *overrides))


def test_options_of_own_losses_are_accepted():
    check(config("loss=own", "loss._target_=own_losses.Focal", "+loss.gamma=1"))
    check(config("loss=own", "loss._target_=own_losses.scaled", "+loss.scale=1.5"))
    check(config("loss=own", "loss._target_=torch.nn.CrossEntropyLoss", "+loss.label_smoothing=0.1"))
