"""When the loop calls hooks, and what they see."""

from functools import partial
from typing import Any

import pytest
import torch
from case import config_of

from ddp_lab.config.types import Every
from ddp_lab.data.batch import Batch
from ddp_lab.data.loader import DeviceLoader
from ddp_lab.observe.logger import Logger
from ddp_lab.run.build import build
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.hooks import Hook, Run, close_all
from ddp_lab.training.loop import fit
from ddp_lab.training.pictures import SHOWN, Pictures, is_drawn, one_of_each
from ddp_lab.training.progress import Progress
from ddp_lab.training.sync import Sync
from ddp_lab.world.runtime import Runtime


class Recording(Hook):
    """Records its calls, each with the step after which it was made."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_start(self, run: Run) -> None:
        self.run = run
        self._record("on_start")

    def _record(self, name: str) -> None:
        self.calls.append((name, self.run.position.step))

    def before_step(self, batch: Any) -> Any:
        self._record("before_step")
        return batch

    def on_step_end(self, position: Any) -> None:
        assert position is self.run.position
        self._record("on_step_end")

    def on_evaluation_batch(self, position: Any, number: int) -> None:
        self._record(f"on_evaluation_batch {number}")

    def on_evaluate(self, results: Any) -> None:
        assert self.run.position.sums
        self._record(f"on_evaluate {' '.join(results)}")

    def on_epoch_end(self, position: Any) -> None:
        assert position.samples == 0
        self._record("on_epoch_end")

    def close(self, status: str) -> None:
        self._record(f"close {status}")


class Drawing(Logger):
    """Counts what it would draw."""

    def __init__(self, draws_predictions: bool) -> None:
        self.draws_predictions = draws_predictions
        self.drawn: list[tuple[int, int]] = []
        self.confusions = 0

    def predictions(
        self, epoch: int, inputs: torch.Tensor, targets: torch.Tensor, logits: torch.Tensor
    ) -> None:
        assert len(inputs) == len(targets) == len(logits)
        self.drawn.append((epoch, len(inputs)))

    def confusion(self, epoch: int, counts: torch.Tensor | None, name: str = "test") -> None:
        self.confusions += counts is not None


def train(hooks: list[Hook], logger: Logger | None = None, case: str = "single") -> Run:
    """Train two epochs of three batches, with an evaluation of two."""
    job = build(config_of(case), Runtime("cpu"))
    eager = job.trainer().eager_step
    sync = Sync(job.strategy, eager.running_sums, Every())
    run = Run(
        eager, eager, job.loaders, job.fit_settings, logger or Logger(), hooks, sync, Progress()
    )
    fit(run)
    return run


def test_hooks_are_called_in_order():
    hook = Recording()
    train([hook])
    close_all([hook], "finished")
    expected = [("on_start", 0)]
    for first in (0, 3):
        for step in range(first, first + 3):
            expected += [("before_step", step), ("on_step_end", step + 1)]
        last = first + 3
        expected += [("on_evaluation_batch 1", last), ("on_evaluation_batch 2", last)]
        expected += [("on_evaluate test", last), ("on_epoch_end", last)]
    assert hook.calls == [*expected, ("close finished", 6)]


def test_step_takes_the_batch_that_a_hook_returns():
    class Zeros(Hook):
        def before_step(self, batch: Batch) -> Batch:
            return batch._replace(inputs=batch.inputs * float("nan"))

    with pytest.raises(Exception, match="nothing to learn from"):
        train([Zeros()], case="single on_nan=skip")


@pytest.mark.parametrize("draws", [True, False])
def test_pictures_predict_eight_samples_where_the_logger_draws_them(monkeypatch, draws):
    sizes: list[int] = []
    predict = Strategy.predict

    def count(self: Strategy, inputs: torch.Tensor) -> torch.Tensor:
        sizes.append(len(inputs))
        return predict(self, inputs)

    monkeypatch.setattr(Strategy, "predict", count)
    logger = Drawing(draws)
    train([Pictures()], logger)
    evaluation = [24, 7]
    per_epoch = [*evaluation, SHOWN] if draws else evaluation
    assert sizes == per_epoch * 2
    assert logger.drawn == ([(1, SHOWN), (2, SHOWN)] if draws else [])
    assert logger.confusions == 2


@pytest.mark.parametrize(
    ("classes", "places"),
    [
        (
            [0, 0, 1, 1, 2, 2],
            [0, 1, 2, 4],
        ),  # then the first of the rest
        ([2, 1, 0, 3, 0], [2, 1, 0, 3]),
        ([5, 5], [0, 1]),
        ([4, 3, 2, 1, 0], [3, 2, 1, 0]),
    ],
)
def test_pictures_are_of_different_classes_as_far_as_there_are_any(classes, places):
    assert one_of_each(classes, 4) == places


def test_few_epochs_of_a_long_run_are_drawn():
    epochs = (1, 9, 10, 11, 20, 99, 100, 110, 1000, 1100)
    assert [epoch for epoch in epochs if is_drawn(epoch)] == [1, 9, 10, 20, 100, 1000]


@pytest.mark.parametrize("kind", ["device", "workers"])
def test_first_samples_are_those_of_the_first_batch(kind):
    job = build(config_of(f"single data.loader={kind}"), Runtime("cpu"))
    loader = job.loaders["test"]
    read = partial(torch.allclose, rtol=0, atol=0)
    first = loader.first(5)
    batch = next(iter(loader))
    assert isinstance(loader, DeviceLoader) == (kind == "device")
    assert read(first.inputs, batch.inputs[:5])
    assert read(first.targets, batch.targets[:5])
    assert first.global_size == 5
    every_tenth = loader.first(2, spread=True)
    whole = loader.first(1000).inputs
    assert read(every_tenth.inputs, whole[[0, len(whole) // 2]])
    loader.close()


def test_run_can_be_printed_before_its_first_step():
    class Printing(Hook):
        def on_start(self, run: Run) -> None:
            self.text = repr(run)

    hook = Printing()
    train([hook])
    assert hook.text.startswith("Run(eager=")
