"""Streams in a Lab: a loop and `fit`, their checkpoints, and what is refused."""

from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from own_streams import Evaluated, Images, Noisy, OfImage, Stateful
from torch.nn.functional import cross_entropy
from worlds import run_world

from ddp_lab import Lab
from ddp_lab.config.errors import ConfigError
from ddp_lab.data import stream

Losses = list[float]


def trainer_of(lab: Lab, **options):
    return lab.trainer(
        OfImage(),
        partial(cross_entropy, reduction="none"),
        partial(torch.optim.SGD, lr=0.1),
        12,
        **options,
    )


def loop(strategy: str, dataset: type, folder: str, ends: list[int], readers: int) -> Losses:
    """Train until a number of steps, once for each of `ends`; return all losses.

    Each resumes from the checkpoint of the one before.
    """
    stream.STATE_SECONDS = 0.0
    losses: Losses = []
    for end in ends:
        with Lab(strategy, "cpu") as lab:
            trainer = trainer_of(lab, readers=readers)
            _, done = trainer.resume(folder)
            batches = trainer.batches(dataset(), 0)
            losses += [trainer.step(*batch).item() for batch in islice(batches, end - done)]
            trainer.checkpoint(folder)
    return losses


@pytest.mark.parametrize(
    ("dataset", "readers"), [pytest.param(Noisy, 1, marks=pytest.mark.slow), (Stateful, 2)]
)
def test_loop_resumes_in_another_world_as_one_without_an_end(dataset, readers, tmp_path):
    whole = run_world(1, loop, "single", dataset, str(tmp_path / "whole"), [9], readers)[0]
    folder = str(tmp_path / "parts")
    before = run_world(2, loop, "ddp", dataset, folder, [4], readers)[0]
    after = run_world(1, loop, "single", dataset, folder, [7, 9], readers)[0]
    assert [*before, *after] == pytest.approx(whole, abs=1e-6)
    assert len(whole) == 9
    saved = torch.load(max(Path(folder).glob("step_*.pt")), weights_only=True)
    assert saved["progress"]["stream"]["readers"] == readers
    assert bool(saved["progress"]["stream"]["states"]) == (dataset is Stateful)


def fit(folder: str, ends: list[int]) -> dict[str, float]:
    stream.STATE_SECONDS = 0.0
    metrics: dict[str, float] = {}
    for end in ends:
        with Lab("single", "cpu") as lab:
            trainer = trainer_of(lab, num_workers=1)
            trainer.resume(folder)
            metrics = trainer.fit(Stateful(), Evaluated(), max_steps=end)
            trainer.checkpoint(folder)
    return metrics


def test_fit_ends_after_max_steps_and_resumes(tmp_path):
    whole = fit(str(tmp_path / "whole"), [9])
    parts = fit(str(tmp_path / "parts"), [4, 9])
    assert {name: parts[name] for name in ("train_loss", "val_loss")} == {
        name: whole[name] for name in ("train_loss", "val_loss")
    }


def test_fit_of_a_map_style_dataset_ends_within_an_epoch():
    with Lab("single", "cpu") as lab:
        trainer = trainer_of(lab)
        metrics = trainer.fit(Evaluated(), None, max_steps=4)  # of three steps an epoch
        assert metrics["step"] == 4
        assert (trainer.progress.epoch, trainer.progress.samples) == (1, 12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda trainer: trainer.fit(Images(), None, 3), "epochs=3: a stream has no epochs"),
        (lambda trainer: trainer.fit(Images(), None), "fit: the training would have no end"),
        (lambda trainer: next(trainer.batches(Images(), 1)), "epoch=1: a stream has no epochs"),
        (lambda trainer: trainer.evaluate(Images()), "got the IterableDataset Images"),
        (
            lambda trainer: trainer.fit(Evaluated(), Images(), 1),
            "validation: must be a map-style dataset",
        ),
    ],
)
def test_what_a_stream_does_not_support_is_refused(call, message):
    with Lab("single", "cpu") as lab, pytest.raises(ConfigError, match=message):
        call(trainer_of(lab))


def test_readers_are_for_streams():
    with Lab("single", "cpu") as lab:
        trainer = trainer_of(lab, readers=2)
        with pytest.raises(ConfigError, match="readers=2: is for a stream, an IterableDataset"):
            next(trainer.batches(Evaluated(), 0))
        _ = next(trainer.batches(Images(), 0))
        with pytest.raises(ConfigError, match="readers=0: must be an integer of at least 1"):
            trainer_of(lab, readers=0)


def test_checkpoint_of_other_readers_is_refused(tmp_path):
    loop("single", Images, str(tmp_path), [2], 1)
    with Lab("single", "cpu") as lab:
        trainer = trainer_of(lab, readers=2)
        trainer.resume(tmp_path)
        with pytest.raises(ConfigError, match=r"data.readers=2: the checkpoint is of a run with"):
            next(trainer.batches(Images(), 0))
