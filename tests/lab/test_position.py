"""Epochs are counted once by loops and `fit`: the position, order of samples, and checkpoints."""

from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from training import full_weights

from ddp_lab import Lab, tasks
from ddp_lab.checkpoints.checkpoints import Checkpoints
from ddp_lab.lab.trainer import Trainer
from ddp_lab.training.hooks import Hook, Run
from ddp_lab.training.loop import fit as fit_run
from ddp_lab.training.progress import Progress

# three steps an epoch, the last one on a partial batch
SIZE = 20
BATCH = 8
STEPS = 3
EPOCHS = 4


def data() -> TensorDataset:
    return TensorDataset(torch.arange(float(SIZE))[:, None], torch.zeros(SIZE, 1))


class Seen(nn.Module):
    """A model that keeps the samples of its training steps, in their order."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.batches: list[list[int]] = []

    def forward(self, inputs):
        if self.training:
            self.batches.append([int(number) for number in inputs.flatten()])
        return self.layer(inputs)


def trainer_of(lab: Lab) -> tuple[Trainer, Seen]:
    torch.manual_seed(0)
    model = Seen()
    make = partial(torch.optim.SGD, lr=1e-4, momentum=0.9)
    return lab.trainer(model, tasks.Regression(), make, batch_size=BATCH), model


def loop(trainer: Trainer, first: int, end: int, stop: int | None = None) -> None:
    """Train the epochs from `first` to before `end` in a loop, and leave it after step `stop`."""
    for epoch in range(first, end):
        for inputs, targets in trainer.batches(data(), epoch):
            trainer.step(inputs, targets)
            if trainer.progress.step == stop:
                return


class Left(Exception):
    pass


def fit(trainer: Trainer, epochs: int, stop: int | None = None) -> None:
    """Call `fit`, and leave it after the step `stop` of the run."""

    class Stop(Hook):
        def on_start(self, run: Run) -> None:
            self.run = run

        def on_step_end(self, position: Progress) -> None:
            if position.step == stop:
                trainer.position = self.run.current()
                raise Left

    def fit_with_stop(run: Run) -> Progress:
        return fit_run(replace(run, hooks=[*run.hooks, Stop()]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp_lab.lab.trainer.fit", fit_with_stop)
        if stop is None:
            trainer.fit(data(), data(), epochs=epochs)
        else:
            with pytest.raises(Left):
                trainer.fit(data(), data(), epochs=epochs)


def run(trainer: Trainer, how: str, epochs: int, stop: int | None = None) -> None:
    """Train until `epochs` epochs are done in a loop from where the trainer is, or by `fit`."""
    if how == "loop":
        loop(trainer, trainer.progress.epoch, epochs, stop)
    else:
        fit(trainer, epochs, stop)


def order_of(epoch: int) -> list[int]:
    return torch.randperm(SIZE, generator=torch.Generator().manual_seed(epoch)).tolist()


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize(("how", "first"), [("loop", 0), ("fit", 1)])
def test_orders_of_a_loop_and_of_fit_stay_as_they_were(how, first):
    with Lab(device="cpu") as lab:
        trainer, model = trainer_of(lab)
        run(trainer, how, 2)
    assert flat(model.batches) == [*order_of(first), *order_of(first + 1)]


@pytest.mark.parametrize(("how", "first"), [("loop", 0), ("fit", 1)])
def test_epoch_of_the_position_is_the_one_that_a_loop_reads_next(how, first):
    with Lab(device="cpu") as lab:
        trainer, model = trainer_of(lab)
        run(trainer, how, 1)
        while trainer.progress.epoch < 3:
            for inputs, targets in trainer.batches(data(), trainer.progress.epoch):
                trainer.step(inputs, targets)
    assert flat(model.batches) == [
        number for epoch in range(3) for number in order_of(first + epoch)
    ]


def test_fit_after_a_loop_trains_the_epochs_that_are_left():
    with Lab(device="cpu") as lab:
        trainer, model = trainer_of(lab)
        loop(trainer, 0, 3)
        steps = len(model.batches)
        assert trainer.fit(data(), data(), epochs=3) == {}
        assert len(model.batches) == steps == 3 * STEPS
        assert trainer.fit(data(), data(), epochs=EPOCHS)
    assert flat(model.batches) == [number for epoch in range(EPOCHS) for number in order_of(epoch)]


@pytest.mark.parametrize("resumed", [False, True], ids=["same_trainer", "another_trainer"])
@pytest.mark.parametrize(
    "stop", [2 * STEPS, 2 * STEPS + 1], ids=["between_epochs", "within_an_epoch"]
)
@pytest.mark.parametrize(
    ("before", "after"), [("loop", "fit"), ("fit", "loop"), ("loop", "loop"), ("fit", "fit")]
)
def test_run_that_goes_on_otherwise_is_the_run_that_does_not(
    before, after, stop, resumed, tmp_path
):
    """The samples and their order, epochs and weights are those of a run never left."""
    with Lab(device="cpu") as lab:
        whole, model = trainer_of(lab)
        run(whole, before, EPOCHS)
        expected = model.batches
        weights = full_weights(whole.strategy)
        trainer, model = trainer_of(lab)
        left = stop if stop % STEPS else None
        run(trainer, before, EPOCHS if left else 2, left)
        batches = model.batches
        trainer.checkpoint(tmp_path)
        if resumed:
            trainer, model = trainer_of(lab)
            batches = batches + model.batches
        position = trainer.resume(tmp_path)
        assert position == (2, stop % STEPS)
        run(trainer, after, EPOCHS)
        all_batches = batches + model.batches if resumed else model.batches
        assert all_batches == expected
        assert trainer.progress.step == EPOCHS * STEPS
        assert all(
            torch.equal(full_weights(trainer.strategy)[name], value)
            for name, value in weights.items()
        )
        assert trainer.fit(data(), data(), epochs=EPOCHS) == {}


@pytest.mark.parametrize(("how", "epoch", "position"), [("loop", 1, (1, 1)), ("fit", 2, (2, 1))])
def test_checkpoint_of_an_older_version_is_read_as_it_was(
    how, epoch, position, tmp_path, monkeypatch
):
    """It does not say who wrote it: a loop numbered its epochs from 0, and `fit` from 1."""
    with Lab(device="cpu") as lab:
        trainer, _ = trainer_of(lab)
        run(trainer, how, EPOCHS, stop=STEPS + 1)
        old = {
            key: value for key, value in asdict(trainer.position).items() if key != "first_order"
        } | {"epoch": epoch}
        trainer.checkpoint(tmp_path)
        trainer, model = trainer_of(lab)
        resume = Checkpoints.resume

        def resume_old(self, *arguments):
            resume(self, *arguments)
            return Progress.of(old)

        monkeypatch.setattr(Checkpoints, "resume", resume_old)
        assert trainer.resume(tmp_path) == position
        if how == "loop":
            loop(trainer, 1, 3)
        else:
            trainer.fit(data(), data(), epochs=3)
        first = 0 if how == "loop" else 1
        assert flat(model.batches) == [*order_of(first + 1)[BATCH:], *order_of(first + 2)]


def test_loop_that_has_trained_on_a_batch_of_its_own_gets_the_order_of_its_epoch():
    """`batches` then finds steps that no dataset has counted."""
    with Lab(device="cpu") as lab:
        trainer, model = trainer_of(lab)
        trainer.step(torch.ones(BATCH, 1), torch.zeros(BATCH, 1))
        loop(trainer, 0, 1)
    assert flat(model.batches[1:]) == order_of(0)


@pytest.mark.parametrize("resumed", [False, True], ids=["same_trainer", "another_trainer"])
def test_fit_after_a_loop_that_was_left_at_the_last_step_of_an_epoch(resumed, tmp_path):
    with Lab(device="cpu") as lab:
        trainer, model = trainer_of(lab)
        loop(trainer, 0, 1, stop=STEPS)
        trainer.checkpoint(tmp_path)
        if resumed:
            trainer, model = trainer_of(lab)
            trainer.resume(tmp_path)
        else:
            model.batches.clear()
        assert trainer.fit(data(), data(), epochs=1) == {}
        assert model.batches == []
        assert trainer.fit(data(), data(), epochs=2)
    assert flat(model.batches) == order_of(1)
