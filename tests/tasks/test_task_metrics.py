"""The metrics of tasks, from sums over batches, equal those of scikit-learn or torch."""

import math

import pytest
import torch
import torch.nn.functional as F

from ddp_lab.tasks.base import Task
from ddp_lab.tasks.multi_label import MultiLabel
from ddp_lab.tasks.regression import Regression
from ddp_lab.tasks.segmentation import Segmentation
from ddp_lab.tasks.tokens import IGNORE, Tokens

GENERATOR = torch.Generator().manual_seed(0)


def metrics_of(task: Task, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Return the metrics of all samples, from sums over three batches of different sizes."""
    batches = [
        task.sums(*batch)
        for batch in zip(outputs.split([5, 8, 7]), targets.split([5, 8, 7]), strict=True)
    ]
    return task.metrics(
        {name: sum(batch[name].double() for batch in batches) for name in batches[0]}
    )


def test_regression():
    # takes 1 s, which all processes of pytest would spend
    from sklearn.metrics import mean_absolute_error, r2_score

    outputs, targets = torch.randn(2, 20, 3, generator=GENERATOR)
    metrics = metrics_of(Regression(), outputs, targets)
    assert metrics["mae"] == pytest.approx(mean_absolute_error(targets, outputs))
    assert metrics["rmse"] == pytest.approx(F.mse_loss(outputs, targets).sqrt().item())
    assert metrics["r2"] == pytest.approx(r2_score(targets.flatten(), outputs.flatten()))


def test_multi_label():
    from sklearn.metrics import f1_score

    outputs = torch.randn(20, 4, generator=GENERATOR)
    targets = torch.randint(0, 2, (20, 4), generator=GENERATOR)
    metrics = metrics_of(MultiLabel(), outputs, targets)
    decided = (outputs > 0).long()
    assert metrics["accuracy"] == pytest.approx((decided == targets).double().mean().item())
    assert metrics["f1_micro"] == pytest.approx(f1_score(targets, decided, average="micro"))
    assert metrics["f1_macro"] == pytest.approx(f1_score(targets, decided, average="macro"))


def test_segmentation_ignores_pixels():
    from sklearn.metrics import jaccard_score

    outputs = torch.randn(20, 3, 6, 6, generator=GENERATOR)
    targets = torch.randint(0, 3, (20, 6, 6), generator=GENERATOR)
    targets[torch.rand(targets.shape, generator=GENERATOR) < 0.4] = 255
    real = targets != 255
    predicted = outputs.argmax(1)
    metrics = metrics_of(Segmentation(), outputs, targets.to(torch.uint8))
    assert metrics["accuracy"] == pytest.approx((predicted == targets)[real].double().mean().item())
    assert metrics["mean_iou"] == pytest.approx(
        jaccard_score(targets[real], predicted[real], average="macro")
    )


def test_tokens_ignore_positions():
    outputs = torch.randn(20, 7, 11, generator=GENERATOR)
    targets = torch.randint(0, 11, (20, 7), generator=GENERATOR)
    targets[:, 5:] = IGNORE
    loss = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORE).item()
    metrics = metrics_of(Tokens(), outputs, targets)
    assert metrics["perplexity"] == pytest.approx(math.exp(loss))
    assert metrics["bits_per_byte"] == pytest.approx(loss / math.log(2))
    assert metrics["accuracy"] == pytest.approx(
        (outputs.argmax(-1) == targets)[:, :5].double().mean().item()
    )


@pytest.mark.parametrize(
    ("nats", "perplexity"),
    [
        (699.75, math.exp(699.75)),
        (5000.0, math.exp(700)),
    ],
)
def test_perplexity_of_a_diverged_model_is_a_number(nats, perplexity):
    numbers = {"nats": 4 * nats, "tokens": 4, "correct": 1}
    sums = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    metrics = Tokens().metrics(sums)
    assert metrics["perplexity"] == pytest.approx(perplexity, rel=1e-9)
    assert metrics["bits_per_byte"] == pytest.approx(nats / math.log(2), rel=1e-9)
    assert metrics["accuracy"] == 0.25
