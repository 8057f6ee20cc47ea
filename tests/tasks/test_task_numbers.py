"""One row of numbers for each task and each weighted loss, worked out on paper.

The logits are logarithms, so that probabilities are fractions: softmax(0, ln 3) is (1/4, 3/4),
softmax(0, 0, ln 2) is (1/4, 1/4, 1/2), and sigmoid(ln 3) is 3/4.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from ddp_lab import Lab
from ddp_lab.config.errors import TrainingError
from ddp_lab.tasks import Classification, MultiLabel, Regression, Segmentation, Task, Tokens
from ddp_lab.tasks.base import measure
from ddp_lab.tasks.classification import CrossEntropy
from ddp_lab.training.metrics import means

SGD = partial(torch.optim.SGD, lr=0.1)
LN2 = math.log(2)
LN3 = math.log(3)
LN4 = math.log(4)
RIGHT = math.log(4 / 3)  # -ln(3/4)


def trained(task: Task, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Return the training metrics of two micro-batches: the first sample, and the others."""
    cuts = [1, len(outputs) - 1]
    parts = zip(outputs.split(cuts), targets.split(cuts), strict=True)
    sums = [measure(task, *part, num_valid=len(part[0]), divisor=1.0)[1] for part in parts]
    return means(task, (sums[0] + sums[1]).tolist())


def evaluated(task: Task, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Return the metrics of an evaluation of the same two micro-batches."""
    cuts = [1, len(outputs) - 1]
    parts = zip(outputs.split(cuts), targets.split(cuts), strict=True)
    first, second = (task.sums(*part) for part in parts)
    return task.metrics({name: first[name].double() + second[name].double() for name in first})


def approx(**values: float):
    return pytest.approx(values, rel=1e-6)


# Classification: three samples, of which the first is wrong, with the losses ln 4, ln(4/3),
# ln(4/3).
CLASS_LOGITS = torch.tensor([[0.0, LN3], [0.0, LN3], [LN3, 0.0]])
CLASSES = torch.tensor([0, 1, 0])


def test_classification():
    # (ln 4 + 2 ln(4/3)) / 3; 2 of 3 are right
    metrics = trained(Classification(), CLASS_LOGITS, CLASSES)
    assert metrics == approx(loss=(LN4 + 2 * RIGHT) / 3, accuracy=2 / 3)
    assert evaluated(Classification(), CLASS_LOGITS, CLASSES) == approx(accuracy=2 / 3)


def test_classification_has_the_top5_accuracy_of_six_classes():
    logits = torch.tensor([[6.0, 5, 4, 3, 2, 1]]).expand(4, 6)
    # The class of rank 1 is right, those of ranks 2 and 5 are in the first five, that of rank 6 is
    # not.
    targets = torch.tensor([0, 1, 4, 5])
    assert evaluated(Classification(), logits, targets) == approx(
        accuracy=1 / 4, top5_accuracy=3 / 4
    )


def test_classification_with_a_weighted_loss_weighs_losses_and_accuracy():
    def weighted(outputs, targets):
        class_weights = torch.tensor([3.0, 1.0])
        return F.cross_entropy(outputs, targets, reduction="none"), class_weights[targets]

    # weights 3, 1, 3: (3 ln 4 + 1 ln(4/3) + 3 ln(4/3)) / 7; right are those of weight 1 and 3
    metrics = trained(Classification(weighted), CLASS_LOGITS, CLASSES)
    assert metrics == approx(loss=(3 * LN4 + 4 * RIGHT) / 7, accuracy=4 / 7)


def test_classification_with_label_smoothing():
    # 0.2 is spread over two classes: 0.9 of the target and 0.1 of the other one. Wrong sample:
    # 0.9 ln 4 + 0.1 ln(4/3); each right one: 0.9 ln(4/3) + 0.1 ln 4. In sum 1.1 ln 4 + 1.9 ln(4/3).
    task = Classification(CrossEntropy(0.2))
    expected = (1.1 * LN4 + 1.9 * RIGHT) / 3
    assert trained(task, CLASS_LOGITS, CLASSES) == approx(loss=expected, accuracy=2 / 3)
    task.eval()  # no label smoothing
    assert trained(task, CLASS_LOGITS, CLASSES)["loss"] == pytest.approx((LN4 + 2 * RIGHT) / 3)


def test_classification_of_mixed_samples():
    # The first: 3/4 ln 4 + 1/4 ln(4/3), and class 0 is the most probable one, which is wrong. The
    # second: 1/4 ln 4 + 3/4 ln(4/3), right. In sum ln 4 + ln(4/3).
    mixed = torch.tensor([[0.75, 0.25], [0.25, 0.75]])
    metrics = trained(Classification(), CLASS_LOGITS[:2], mixed)
    assert metrics == approx(loss=(LN4 + RIGHT) / 2, accuracy=1 / 2)


# Regression: errors -1, 0, 3.
NUMBERS = torch.tensor([[1.0], [2.0], [4.0]])
WANTED = torch.tensor([[2.0], [2.0], [1.0]])


def test_regression():
    # squares 1 + 0 + 9 = 10; absolute values 1 + 0 + 3 = 4; variation of the targets 2, 2, 1:
    # 4 + 4 + 1 - 5**2 / 3 = 2/3, so that r2 = 1 - 10 / (2/3) = -14
    assert trained(Regression(), NUMBERS, WANTED) == approx(loss=10 / 3)
    metrics = evaluated(Regression(), NUMBERS, WANTED)
    assert metrics == approx(mae=4 / 3, rmse=math.sqrt(10 / 3), r2=-14)


def test_regression_with_a_weighted_loss():
    def weighted(outputs, targets):
        return (outputs - targets).square(), outputs

    # the outputs are the weights: (1 * 1 + 2 * 0 + 4 * 9) / 7
    assert trained(Regression(weighted), NUMBERS, WANTED) == approx(loss=37 / 7)


# Several labels: 7 of 9 decisions are right, with the loss ln(4/3); two are wrong, with ln 4.
DECIDED = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 0, 1]])
LABELS = torch.tensor([[1, 0, 1], [1, 0, 1], [1, 1, 1]])
LABEL_LOGITS = (2.0 * DECIDED - 1) * LN3


def test_multi_label():
    metrics = trained(MultiLabel(), LABEL_LOGITS, LABELS)
    assert metrics == approx(loss=(7 * RIGHT + 2 * LN4) / 9, accuracy=7 / 9)
    # true positives by label 2, 0, 3; positives 3, 1, 3; decided 2, 0, 3. Micro: 2 * 5 / 12;
    # macro: (4/5 + 0/1 + 6/6) / 3
    metrics = evaluated(MultiLabel(), LABEL_LOGITS, LABELS)
    assert metrics == approx(accuracy=7 / 9, f1_micro=5 / 6, f1_macro=3 / 5)


def test_multi_label_does_not_count_a_label_without_positives():
    # without the last sample: true positives 1, 0, 2; positives 2, 0, 2; decided 1, 0, 2
    metrics = evaluated(MultiLabel(), LABEL_LOGITS[:2], LABELS[:2])
    assert metrics == approx(accuracy=5 / 6, f1_micro=6 / 7, f1_macro=(2 / 3 + 1) / 2)


def binary(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets.float(), reduction="none")


def test_multi_label_with_a_weighted_loss_weighs_losses_and_accuracy():
    def weighted(outputs, targets):
        return binary(outputs, targets), 1.0 + 2 * targets

    # A label has the weight 3, none has 1. There are 7 and 2: 23 in all. Both wrong decisions are
    # about labels, 6; the right ones weigh 17.
    metrics = trained(MultiLabel(weighted), LABEL_LOGITS, LABELS)
    assert metrics == approx(loss=(17 * RIGHT + 6 * LN4) / 23, accuracy=17 / 23)


def test_multi_label_with_one_loss_for_each_sample_has_the_accuracy_of_the_decisions():
    # losses 3 ln(4/3), 2 ln(4/3) + ln 4, 2 ln(4/3) + ln 4; a sample has the weight 1
    task = MultiLabel(lambda outputs, targets: binary(outputs, targets).sum(1))
    metrics = trained(task, LABEL_LOGITS, LABELS)
    assert metrics == approx(loss=(7 * RIGHT + 2 * LN4) / 3, accuracy=7 / 9)


def test_multi_label_with_weighted_samples_weighs_the_share_of_right_decisions():
    def weighted(outputs, targets):
        return binary(outputs, targets).sum(1), 1.0 + targets[:, 1]

    # weights 1, 1, 2; of the decisions 3/3, 2/3 and 2/3 are right: (1 + 2/3 + 2 * 2/3) / 4
    metrics = trained(MultiLabel(weighted), LABEL_LOGITS, LABELS)
    assert metrics == approx(loss=(9 * RIGHT + 3 * LN4) / 4, accuracy=3 / 4)


def pixels(targets: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two images of two pixels, with probabilities (1/4, 1/4, 1/2); 2 is predicted."""
    logits = torch.tensor([0.0, 0.0, LN2])[None, :, None, None].expand(2, 3, 1, 2)
    return logits, torch.tensor(targets).view(2, 1, 2)


@pytest.mark.parametrize("ignore", [1, 255, -1])
def test_segmentation_ignores_the_target_that_it_is_given(ignore):
    # losses ln 4, none, ln 2, ln 2: 4 ln 2 / 3. 2 of 3 pixels are right. Class 0: 0 of 1; class 2:
    # 2 of the 3 pixels that are predicted or true; no pixel of class 1: (0 + 2/3) / 2
    task = Segmentation(ignore=ignore)
    logits, targets = pixels([0, ignore, 2, 2])
    assert trained(task, logits, targets) == approx(loss=4 * LN2 / 3)
    assert evaluated(task, logits, targets) == approx(accuracy=2 / 3, mean_iou=1 / 3)


def test_segmentation_with_a_weighted_loss():
    def weighted(outputs, targets):
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return losses, torch.tensor([3.0, 1.0, 0.5])[targets]

    # targets 0, 1, 2, 2: (3 ln 4 + 1 ln 4 + 1/2 ln 2 + 1/2 ln 2) / 5 = 9 ln 2 / 5
    logits, targets = pixels([0, 1, 2, 2])
    assert trained(Segmentation(weighted), logits, targets) == approx(loss=9 * LN2 / 5)


def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    """Return two sentences of three tokens, with the probabilities of `pixels`."""
    logits = torch.tensor([0.0, 0.0, LN2]).expand(2, 3, 3)
    return logits, torch.tensor([[0, -100, 2], [2, 2, -100]])


def test_tokens():
    # losses ln 4, ln 2, ln 2, ln 2 of four tokens: 5 ln 2 / 4, which is 5/4 bits; 3 of 4 are right
    assert trained(Tokens(), *sentences()) == approx(loss=5 * LN2 / 4)
    metrics = evaluated(Tokens(), *sentences())
    assert metrics == approx(accuracy=3 / 4, perplexity=2**1.25, bits_per_byte=5 / 4)


def test_tokens_with_a_weighted_loss():
    def weighted(outputs, targets):
        losses = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
        return losses, torch.tensor([1.0, 2.0, 4.0]) * (targets != -100)

    # by position: (1 ln 4 + 4 ln 2 + 1 ln 2 + 2 ln 2) / (1 + 4 + 1 + 2) = 9 ln 2 / 8
    assert trained(Tokens(weighted), *sentences()) == approx(loss=9 * LN2 / 8)


@pytest.mark.parametrize("chunks", [2, 4, 6])
def test_tokens_whose_loss_is_computed_in_chunks_of_rows(chunks):
    """The sum of `test_tokens`, 5 ln 2 of a weight of 4.

    The gradients of the logits of a row are (1/4, 1/4, 1/2) less 1 for its target. The rows of 0,
    2, 2 and 2 add up to (1, 1, 2) - (1, 0, 3) = (0, 1, -1), which the announced 1/4 multiplies. A
    row has the gradient ln 2 / 2 of its input, less ln 2 if its target is 2, and 0 if it is none.
    """
    head = torch.nn.Linear(1, 3, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0], [0.0], [LN2]]))
    hidden = torch.ones(2, 3, 1, requires_grad=True)
    _, targets = sentences()
    total, weight = Tokens(head_chunks=chunks).losses_of_head(head, hidden, targets, factor=1 / 4)
    (total / 4).backward()
    assert (total.item(), weight.item()) == (pytest.approx(5 * LN2), 4)
    assert head.weight.grad.flatten().tolist() == pytest.approx([0, 1 / 4, -1 / 4], abs=1e-6)
    of_rows = [LN2 / 2, 0, -LN2 / 2, -LN2 / 2, -LN2 / 2, 0]
    expected = [each / 4 for each in of_rows]
    assert hidden.grad.flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_task_with_a_function():
    # one loss for each sample: (1 + 0 + 9) / 3; with weights 1, 2, 4: (1 + 0 + 36) / 7
    def squared(outputs, targets):
        return (outputs - targets).square().flatten(1).sum(1)

    def weighted(outputs, targets):
        return squared(outputs, targets), outputs.flatten()

    assert trained(Task(squared), NUMBERS, WANTED) == approx(loss=10 / 3)
    assert trained(Task(weighted), NUMBERS, WANTED) == approx(loss=37 / 7)


def plain(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


class Declared(torch.nn.Module):
    """A loss of weight 1 for each sample, as it says; `forward` may do something else."""

    weighted = False

    def __init__(self, forward):
        super().__init__()
        self.forward = forward


def test_losses_may_have_weights_unless_task_or_loss_declare_the_contrary():
    assert not Classification().weighted
    assert not Classification(CrossEntropy(0.1)).weighted
    assert not Task(Declared(plain)).weighted
    assert [
        task.weighted for task in (Task(plain), Classification(plain), Tokens(), Regression())
    ] == [True] * 4


@pytest.mark.parametrize(
    ("forward", "returned"),
    [
        (
            lambda outputs, targets: (plain(outputs, targets), torch.ones(3)),
            r"\(losses, weights\) of \[3\]",
        ),
        (lambda outputs, targets: outputs, r"losses \[3, 2\]"),
    ],
)
def test_declaration_that_the_loss_contradicts_is_refused(forward, returned):
    task = Classification(Declared(forward))
    message = (
        r"^weighted=False declares one loss of weight 1 for each sample, \[3\], but the loss "
        rf"returned {returned}\. "
    )
    with pytest.raises(TrainingError, match=message):
        measure(task, CLASS_LOGITS, CLASSES, num_valid=3, divisor=3.0)


def test_equal_weights_scale_the_gradients_by_exactly_one():
    weights = []
    for loss in (plain, Declared(plain)):
        with Lab(device="cpu") as lab:
            model = torch.nn.Linear(7, 2)
            trainer = lab.trainer(model, Classification(loss), SGD, batch_size=6, accumulate=2)
            trainer.step(torch.rand(6, 7), torch.arange(6) % 2)
            weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)
