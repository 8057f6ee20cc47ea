"""Which datasets a trainer keeps with their worker processes.

Those that were used last, and those that a loop reads.
"""

import os
from functools import partial

import psutil
import pytest
import torch
from torch import nn

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError
from ddp_lab.lab import local_batches

KEPT = 2


class Readers:
    """A dataset whose inputs are the numbers of the processes that read them."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([float(os.getpid())]), torch.zeros(1)


@pytest.fixture
def trainer(monkeypatch):
    monkeypatch.setattr(local_batches, "KEPT", KEPT)
    with Lab(device="cpu") as lab:
        make = partial(torch.optim.SGD, lr=0.0)
        yield lab.trainer(nn.Linear(1, 1), tasks.Regression(), make, batch_size=4, num_workers=1)


def reader(trainer, dataset) -> int:
    """Return the process that reads a dataset."""
    (sample,) = {int(number) for inputs, _ in trainer.batches(dataset, 0) for number in inputs}
    return sample


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_least_recently_used_dataset_is_forgotten_and_its_worker_ends(trainer):
    first = Readers()
    second = Readers()
    third = Readers()
    kept = reader(trainer, first)
    forgotten = reader(trainer, second)
    assert reader(trainer, first) == kept
    assert reader(trainer, third) not in (kept, forgotten)
    assert not runs(forgotten)
    assert reader(trainer, first) == kept
    assert reader(trainer, second) != forgotten


def test_dataset_of_a_running_loop_is_kept(trainer):
    training = Readers()
    batches = trainer.batches(training, 0)
    inputs, _ = next(batches)
    for _ in range(2 * KEPT):
        reader(trainer, Readers())
    assert [set(rest.flatten().tolist()) for rest, _ in batches] == [{inputs[0].item()}] * 2
    assert reader(trainer, training) == inputs[0].item()


def test_training_set_beside_four_validation_sets_keeps_its_worker():
    training, *validation = [Readers() for _ in range(5)]
    with Lab(device="cpu") as lab:
        make = partial(torch.optim.SGD, lr=0.0)
        trainer = lab.trainer(
            nn.Linear(1, 1), tasks.Regression(), make, batch_size=4, num_workers=1
        )
        samples = set()
        for _ in range(2):
            samples.add(reader(trainer, training))
            for dataset in validation:
                trainer.evaluate(dataset)
    assert len(samples) == 1


def test_batches_after_their_lab_is_closed_are_refused():
    with Lab(device="cpu") as lab:
        make = partial(torch.optim.SGD, lr=0.0)
        trainer = lab.trainer(
            nn.Linear(1, 1), tasks.Regression(), make, batch_size=4, num_workers=1
        )
        batches = trainer.batches(Readers(), 0)
        inputs, _ = next(batches)
    assert not runs(int(inputs[0]))
    with pytest.raises(
        ConfigError, match=r"^batches: their Lab is closed; read them within its `with` block$"
    ):
        next(batches)
