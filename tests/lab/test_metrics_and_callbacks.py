"""Metrics of torchmetrics and callbacks in a Lab."""

from functools import partial
from typing import Any

import own_callbacks
import pytest
import torch
from sklearn.metrics import roc_auc_score
from slow_rows import slow_but
from torch import nn
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Hook, Lab, tasks
from ddp_lab.config.errors import ConfigError, TrainingError

SIZE = 29  # of 3 batches of 12, the last one has 5
SGD = partial(torch.optim.SGD, lr=0.5)


def points(size: int = SIZE) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, 6, generator=generator)
    return TensorDataset(inputs, (inputs[:, :3].argmax(1) + (inputs[:, 5] > 1)) % 3)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Recorder(Hook):
    """Records what it is given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_start(self, run: Any) -> None:
        self.seen.append(("start", run.position.step, run.folder))

    def on_evaluate(self, results: Any) -> None:
        self.seen.append(results["val"].values["auroc"])

    def close(self, status: str) -> None:
        self.seen.append(status)


def train(strategy: str, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Train for two epochs by `fit`, evaluate, and compute the same on one device."""
    import own_metrics
    import torchmetrics

    dataset = points()
    recorder = Recorder()
    auroc = torchmetrics.AUROC(task="multiclass", num_classes=3)
    # a metric within a metric must not wait for the other ranks either
    doubled = 2.0 * torchmetrics.AUROC(task="multiclass", num_classes=3)
    metrics = {"auroc": auroc, "ordered": own_metrics.Ordered, "doubled": doubled}
    with Lab(strategy, device="cpu", **options) as lab:
        model = net()
        trainer = lab.trainer(
            model,
            tasks.Classification(),
            SGD,
            batch_size=12,
            example=dataset[0],
            metrics=metrics,
            callbacks=[recorder],
            **more,
        )
        fitted = trainer.fit(dataset, dataset, 2)
        evaluated = trainer.evaluate(dataset)
        outputs = trainer.predict(dataset.tensors[0])
    expected = roc_auc_score(dataset.tensors[1], outputs.softmax(1), multi_class="ovr")
    return {
        "fitted": fitted,
        "evaluated": evaluated,
        "expected": float(expected),
        "seen": recorder.seen,
    }


WORLDS = [("single", 1, {}), ("ddp", 2, {}), ("ddp", 3, {}), ("fsdp", 2, {})]
WORLDS += [("pipeline", 2, {"num_microbatches": 2})]


@once
def trained(strategy: str, ranks: int, averaged: bool = False) -> list[dict[str, Any]]:
    (options,) = [each for name, size, each in WORLDS if (name, size) == (strategy, ranks)]
    more = {"ema": 0.8} if averaged else {}
    return run_world(ranks, partial(train, **more), strategy, options)


@pytest.mark.parametrize("averaged", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    slow_but([("single", 1), ("ddp", 2)], [world[:2] for world in WORLDS]),
)
def test_metrics_are_those_of_the_complete_set(strategy, ranks, averaged):
    (single,) = trained("single", 1, averaged)
    for rank, outcome in enumerate(trained(strategy, ranks, averaged)):
        evaluated = outcome["evaluated"]
        assert evaluated["auroc"] == pytest.approx(outcome["expected"], abs=1e-6)
        assert evaluated["doubled"] == pytest.approx(2 * evaluated["auroc"])
        assert evaluated["ordered"] == pytest.approx(single["evaluated"]["ordered"], rel=1e-5)
        if rank == 0:
            assert outcome["fitted"]["val_auroc"] == evaluated["auroc"]
        start, first, second, status = outcome["seen"]
        assert start == ("start", 0, None)
        assert second == evaluated["auroc"]
        assert first != second
        assert status == "finished"


def make(**arguments: Any) -> None:
    with Lab(device="cpu") as lab:
        trainer = lab.trainer(net(), tasks.Classification(), SGD, batch_size=12, **arguments)
        trainer.fit(points(), points(), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metrics": [3]}, "metrics: builtins.int is no metric: it must be a subclass"),
        ({"callbacks": Recorder()}, "callbacks=<.*: must be a list of subclasses of ddp_lab.Hook"),
        ({"callbacks": [own_callbacks.NoHook]}, "own_callbacks.NoHook is no hook"),
        ({"callbacks": [own_callbacks.Failing]}, "Failing cannot be constructed: TypeError"),
        (
            {"callbacks": [own_callbacks.Failing("on_evaluate")]},
            r"own_callbacks.Failing.on_evaluate raised ValueError: planted \(own_callbacks.py",
        ),
    ],
)
def test_wrong_metrics_and_callbacks_are_one_message(arguments, message):
    with pytest.raises((ConfigError, TrainingError), match=message):
        make(**arguments)


def test_metrics_that_are_no_list_or_fail_are_one_message():
    import own_metrics

    with pytest.raises(ConfigError, match=r"metrics=<class .*: must be a list of metrics"):
        make(metrics=own_metrics.Seen)
    with pytest.raises(TrainingError, match=r"fails in update .* cannot count \(own_metrics.py"):
        make(metrics=[own_metrics.Failing])


def test_callbacks_are_closed_as_failed_after_an_error():
    import torchmetrics

    recorder = Recorder()
    with pytest.raises(TrainingError):
        make(
            metrics=[torchmetrics.AUROC(task="multiclass", num_classes=3)],
            callbacks=[recorder, own_callbacks.Failing("on_epoch_end")],
        )
    assert recorder.seen[-1] == "failed"


def test_metrics_have_the_names_of_a_dict():
    import own_metrics

    with Lab(device="cpu") as lab:
        metrics = {"first": own_metrics.Seen, "second": own_metrics.Seen()}
        trainer = lab.trainer(net(), nn_loss, SGD, batch_size=12, metrics=metrics)
        values = trainer.evaluate(points())
        assert (values["first"], values["second"]) == (SIZE, SIZE)
        assert trainer.fit(points(), None, 1).keys() >= {"train_loss"}


def nn_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")
