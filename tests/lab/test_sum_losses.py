"""Losses that return the sum of a batch and its weight, where there is not one loss for each
sample.

All cases are in float64, so that any strategy on any number of ranks has the weights of single
within 1e-12, and single those of a loop of plain torch. The weights of the ranks differ. Of the
last batch one rank has fewer samples than the others or, of the first FEW samples, none.
"""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slow_rows import extra, slow, slow_but
from torch import nn
from torch.utils.data import Subset, TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError, SampleError, TrainingError

SIZE = 31
FEW = 25
BATCH = 12
BOXES = 5
LENGTH = 9
WORDS = 4
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
# Three ranks cannot divide the layers for tp, and dp has one process.
WORLDS = [("dp", 1), ("ddp", 2)]
SLOW = [("fsdp", 2), ("scratch", 2), ("ddp", 3)]
EXTRA = [("tp", 2), ("scratch", 3), ("fsdp", 3)]
WORLDS += slow(SLOW)
WORLDS += extra(EXTRA)
CUTTING = {
    "split": {"devices": ["cpu", "cpu"], "num_microbatches": 2},
    "pipeline": {"num_microbatches": 2},
    "mesh": {},
}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(SIZE, *shape, generator=generator, dtype=torch.float64)


class Scenes:
    """Samples with another number of boxes each, which are padded; some have none."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        present = (torch.arange(BOXES) < index * index % (BOXES + 1)).double()
        return numbers(6)[index], {"boxes": numbers(BOXES, 4, seed=1)[index], "present": present}


class Detector(nn.Module):
    """Returns a dict with boxes, and with the sum of some parameters."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, BOXES * 4)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        boxes = self.head(torch.tanh(self.body(inputs))).view(-1, BOXES, 4)
        return {"boxes": boxes, "penalty": self.scale.square().sum()}


def of_boxes(outputs, targets):
    assert len(targets["present"]) > 0
    errors = (outputs["boxes"] - targets["boxes"]).square().sum(2) * targets["present"]
    weight = targets["present"].sum()
    return errors.sum() + 0.1 * weight * outputs["penalty"], weight


class Speech:
    """Samples with two parts of the target: labels that are padded, and their number."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        labels = torch.randint(1, WORDS, (4,), generator=generator)
        return numbers(LENGTH, 3)[index], (labels, 1 + index % 4)


def of_speech(outputs, targets):
    assert len(outputs) > 0
    labels, lengths = targets
    frames = torch.full_like(lengths, LENGTH)
    scores = outputs.log_softmax(2).transpose(0, 1)
    return F.ctc_loss(scores, labels, frames, lengths, reduction="sum"), lengths.sum()


def of_positive(outputs, targets):
    """A loss of tensors, for the strategies that cut a model."""
    assert len(outputs) > 0
    weights = (targets > 0.3).double()
    return ((outputs - targets).square() * weights).sum(), weights.sum()


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


# The model, the loss, the dataset.
CASES: dict[str, tuple[Any, Any, Any]] = {
    "boxes": (Detector, of_boxes, Scenes()),
    "speech": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, WORDS)),
        of_speech,
        Speech(),
    ),
    "positive": (blocks, of_positive, TensorDataset(numbers(6), numbers(3, seed=2) ** 3)),
}


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
        for name, tensor in module.state_dict().items()
    }


def train(
    strategy: str, case: str, accumulate: int = 1, example: bool = True, **options
) -> dict[str, Any]:
    """Train an epoch of all samples and one of the first few, and evaluate both."""
    make, loss, data = CASES[case]
    with Lab(strategy, device="cpu", timeout=30, **options) as lab:
        with_example = {"example": data[0]} if example else {}
        model = make().double()
        trainer = lab.trainer(model, loss, SGD, BATCH, accumulate, **with_example)
        few = Subset(data, range(FEW))
        losses = [
            trainer.step(*batch).item()
            for epoch, each in enumerate((data, few))
            for batch in trainer.batches(each, epoch)
        ]
        losses += [trainer.evaluate(each)["loss"] for each in (data, few)]
        return {"losses": losses, "weights": weights_of(trainer.strategy.module)}


@once
def by_hand(case: str) -> dict[str, Any]:
    """Return the same by a loop of plain torch, which divides the sum of a batch by its weight."""
    make, loss, data = CASES[case]
    with Lab(device="cpu") as lab:
        model = make().double()
        trainer = lab.trainer(blocks().double(), of_positive, SGD, BATCH)
        optimizer = SGD(model.parameters())
        few = Subset(data, range(FEW))
        losses = []
        for epoch, each in enumerate((data, few)):
            for inputs, targets in trainer.batches(each, epoch):
                total, weight = loss(model(inputs), targets)
                mean = total / weight
                mean.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(mean.item())
        for each in (data, few):
            with torch.no_grad():
                sums = [
                    torch.stack(loss(model(inputs), targets))
                    for inputs, targets in trainer.batches(each, 0, shuffle=False)
                ]
            total, weight = torch.stack(sums).sum(0)
            losses.append((total / weight).item())
        return {"losses": losses, "weights": weights_of(model)}


def require_equal(trained: dict[str, Any], expected: dict[str, Any], partly: bool = False) -> None:
    assert trained["losses"] == pytest.approx(expected["losses"], abs=1e-12)
    names = trained["weights"].keys()
    assert partly or names == expected["weights"].keys()
    for name in names:
        assert (trained["weights"][name] - expected["weights"][name]).abs().max() <= 1e-12, name


def all_of(strategy: str, accumulate: int) -> dict[str, dict]:
    return {case: train(strategy, case, accumulate, example=accumulate == 1) for case in CASES}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_single_equals_a_loop_of_torch(accumulate):
    for case, trained in all_of("single", accumulate).items():
        require_equal(trained, by_hand(case))


def of_both(strategy: str) -> dict[int, dict[str, dict]]:
    return {accumulate: all_of(strategy, accumulate) for accumulate in (1, 2)}


@once
def world(strategy: str, ranks: int) -> list[dict[int, dict[str, dict]]]:
    return run_world(ranks, of_both, strategy, timeout=200)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("strategy", "ranks"), WORLDS)
def test_unequal_weights_give_the_weights_of_single(strategy, ranks, accumulate):
    for rank in world(strategy, ranks):
        for case, trained in rank[accumulate].items():
            require_equal(trained, by_hand(case))


def cut(strategy: str) -> dict[int, dict[str, Any]]:
    return {
        accumulate: train(strategy, "positive", accumulate, **CUTTING[strategy])
        for accumulate in (1, 2)
    }


@once
def cut_world(strategy: str) -> list[dict[int, dict[str, Any]]]:
    return run_world(1 if strategy == "split" else 2, cut, strategy, timeout=200)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", slow_but(["split", "pipeline"], CUTTING))
def test_strategies_that_cut_a_model_take_such_a_loss_of_tensors(strategy, accumulate):
    for by_accumulate in cut_world(strategy):
        require_equal(by_accumulate[accumulate], by_hand("positive"), partly=True)


def fitted(strategy: str) -> dict[str, float]:
    make, loss, data = CASES["boxes"]
    with Lab(strategy, device="cpu", timeout=30) as lab:
        trainer = lab.trainer(make().double(), loss, SGD, BATCH, example=data[0])
        return trainer.fit(data, Subset(data, range(FEW)), epochs=2)


def test_fit_divides_the_sums_of_an_epoch_by_its_weight():
    (expected,) = run_world(1, fitted, "single", timeout=60)
    for metrics in run_world(3, fitted, "ddp", timeout=60):
        assert metrics.keys() >= {"train_loss", "val_loss"}
        for name in ("train_loss", "val_loss"):
            assert metrics[name] == pytest.approx(expected[name], abs=1e-12)


def step_with(loss: Any, accumulate: int = 1, **options: Any) -> None:
    data = CASES["positive"][2]
    with Lab(device="cpu") as lab:
        trainer = lab.trainer(blocks().double(), loss, SGD, BATCH, accumulate, **options)
        trainer.step(*next(trainer.batches(data, 0)))


def returning(change: Any) -> Any:
    def loss(outputs, targets):
        return change((outputs - targets).square(), torch.tensor(3.0, dtype=torch.float64))

    return loss


REFUSED = {
    "shapes": (
        lambda losses, weight: (losses.sum(), weight.expand(len(losses))),
        r"the loss must return a loss for each sample, \[12, ...\] for 12 samples, .*got \[\] and "
        r"\[12\]\. Return losses and weights of one shape, or their sums, both of shape \[\]",
    ),
    "weight": (
        lambda losses, weight: (losses, weight),
        r"the weights of a loss must have the shape of its losses, \[12, 3\], got \[\]",
    ),
    "one": (
        lambda losses, weight: losses.mean(),
        r"the loss must return unreduced losses, \[12, ...\] for 12 samples, got \[\]\. .*or "
        r"return \(sum, weight\), both of shape \[\]",
    ),
    "three": (
        lambda losses, weight: (losses.sum(), weight, weight),
        r"the loss must return a tensor, \(losses, weights\) or \(sum, weight\), got a tuple of "
        "3: Tensor, Tensor, Tensor",
    ),
    "number": (
        lambda losses, weight: losses.sum().item(),
        "the loss must return a tensor, .* got float. Return the tensor, without .item()",
    ),
    "number as weight": (
        lambda losses, weight: (losses.sum(), 3),
        r"got a tuple of 2: Tensor, int\. A number as the weight is torch.tensor\(number\)",
    ),
    "dict": (
        lambda losses, weight: {"box": losses.sum()},
        "got dict. Add its parts to one loss",
    ),
    "detached": (
        lambda losses, weight: losses.detach(),
        "the loss does not depend on the outputs of the model, or was detached from them",
    ),
    "gradient": (
        lambda losses, weight: (losses.sum(), losses.sum()),
        "the weight of the loss needs a gradient, by which a step would not be divided. Use "
        r"weight.detach\(\)",
    ),
    "negative": (
        lambda losses, weight: (losses.sum(), -weight),
        r"the weight of the loss is -3; it must be a finite number of at least 0",
    ),
    "nan": (
        lambda losses, weight: (losses.sum(), weight / 0),
        r"the weight of the loss is inf; it must be a finite number of at least 0",
    ),
}


@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_loss_is_one_message(case, example):
    change, message = REFUSED[case]
    with_example = {"example": CASES["positive"][2][0]} if example else {}
    if example:
        message = message.replace("12 samples", "2 samples").replace(r"\[12", r"\[2")
    with pytest.raises((ConfigError, TrainingError, SampleError)) as error:
        step_with(returning(change), **with_example)
    assert re.search(message, str(error.value)), error.value
    assert error.value.__cause__ is None
    assert "\n" not in str(error.value)


def test_metrics_of_training_steps_need_a_loss_for_each_sample():
    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets.argmax(1), reduction="sum"), torch.tensor(12)

    class Chosen(tasks.Classification):
        def running_sums(self, outputs, targets):
            return [self.weighted_sum(outputs[:, 0] > 0, outputs, targets)]

    with pytest.raises(TrainingError, match=r"^Chosen: the training metrics accuracy are weighted"):
        step_with(Chosen(loss))


def test_weighted_false_is_refused_for_sums():
    loss = returning(lambda losses, weight: (losses.sum(), weight))
    loss.weighted = False
    with pytest.raises(
        TrainingError, match=r"^weighted=False declares .* returned \(sum, weight\)"
    ):
        step_with(loss)


def at_least_one(outputs, targets):
    total, weight = of_positive(outputs, targets)
    return total, weight.clamp(min=30.0)


def mean_and_weight(outputs, targets):
    total, weight = of_positive(outputs, targets)
    return total / weight, weight


@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (at_least_one, "the loss is not a sum over samples: it has the weight "),
        (mean_and_weight, "the loss is not a sum over samples: it "),
    ],
)
def test_sums_that_do_not_add_up_are_refused_where_the_batch_is_divided(loss, message, example):
    with_example = {"example": CASES["positive"][2][0]} if example else {}
    with pytest.raises(ConfigError, match=re.escape(message)):
        step_with(loss, accumulate=2, **with_example)
    step_with(loss, **with_example)
    step_with(of_positive, accumulate=2, **with_example)
