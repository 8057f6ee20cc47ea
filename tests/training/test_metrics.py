"""The metrics of an evaluation, and the running sums of the training steps."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.batch import Batch
from ddp_lab.strategies.single import Single
from ddp_lab.tasks.classification import MOST_CLASSES, Classification
from ddp_lab.training.metrics import LONGEST, Evaluation, RunningSums, evaluate
from ddp_lab.world.runtime import Runtime


def evaluated(logits: torch.Tensor, targets: torch.Tensor, size: int = 7) -> Evaluation:
    """Evaluate a model that returns its inputs in batches of `size`, the last one padded."""
    strategy = Single(Runtime("cpu"))
    strategy.setup(torch.nn.Identity())
    batches = []
    for inputs, labels in zip(logits.split(size), targets.split(size), strict=True):
        padding = torch.zeros(size - len(labels), dtype=torch.int64)
        batches.append(
            Batch(torch.cat([inputs, logits[padding]]), torch.cat([labels, padding]), len(labels))
        )
    return evaluate(strategy, batches)


@pytest.mark.parametrize("classes", [6, 30])
def test_evaluation_equals_sums_over_single_samples(classes):
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randn(52, classes, generator=generator)
    targets = torch.randint(classes, (52,), generator=generator)
    tested = evaluated(logits, targets)
    rows = list(zip(logits.tolist(), targets.tolist(), strict=True))
    ranks = [sorted(row, reverse=True).index(row[target]) for row, target in rows]
    pairs = Counter((target, row.index(max(row))) for row, target in rows)
    assert tested.samples == 52
    assert tested.values["loss"] == pytest.approx(F.cross_entropy(logits, targets).item())
    assert tested.values["accuracy"] == ranks.count(0) / 52
    assert tested.values["top5_accuracy"] == sum(rank < 5 for rank in ranks) / 52 < 1
    confusion = tested.sums["confusion"].tolist()
    assert confusion == [
        [pairs[true, predicted] for predicted in range(classes)] for true in range(classes)
    ]


@pytest.mark.parametrize(
    ("classes", "top5", "confusion"),
    [(5, False, True), (6, True, True), (MOST_CLASSES + 1, True, False)],
)
def test_top5_needs_six_classes_and_the_confusion_matrix_not_too_many(classes, top5, confusion):
    tested = evaluated(torch.eye(classes)[:3], torch.arange(3))
    assert (tested.values["accuracy"], tested.values.get("top5_accuracy")) == (
        1,
        1 if top5 else None,
    )
    assert ("confusion" in tested.sums) == confusion


def test_evaluation_of_a_model_that_returns_nan_counts_every_sample():
    tested = evaluated(torch.full((8, 6), float("nan")), torch.arange(8) % 6)
    assert tested.sums["confusion"].sum() == tested.samples == 8
    assert tested.values["loss"] != tested.values["loss"]


@pytest.mark.parametrize("on_host", [True, False], ids=["on the host", "as on a GPU"])
@pytest.mark.parametrize("start", [0, LONGEST - 3])
def test_running_sums_return_the_first_step_that_is_not_finite(start, on_host):
    running_sums = RunningSums(Classification(), torch.device("cpu"))
    if not on_host:
        running_sums.compile(lambda function: function)
    running_sums.begin(start)
    for step in range(1, 11):
        running_sums.add(
            torch.tensor([float("nan") if step in (5, 8) else 1.0, 1.0, 1.0], dtype=torch.float64)
        )
    assert running_sums.first_bad(start + 10).item() == start + 5
    running_sums.add(torch.ones(3, dtype=torch.float64))
    assert running_sums.first_bad(start + 11).item() == float("inf")


class Repeated(torch.nn.Module):
    """A model that returns each of its inputs several times."""

    def __init__(self, times: int):
        super().__init__()
        self.times = times

    def forward(self, inputs):
        return inputs.repeat_interleave(self.times, 0)


@pytest.mark.parametrize("times", [0, 2])
def test_evaluation_of_outputs_that_are_not_one_a_sample_is_refused(times):
    strategy = Single(Runtime("cpu"))
    strategy.setup(Repeated(times))
    batch = Batch(torch.eye(4), torch.arange(4), 4)
    with pytest.raises(ConfigError, match=rf"\[{4 * times}, 4\]"):
        evaluate(strategy, [batch])
