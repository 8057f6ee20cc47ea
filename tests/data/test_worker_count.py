"""data.num_workers=auto: the number by hand, the CPUs of a machine, and runs with it."""

import random
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from launches import main_in_world, read_metrics
from worlds import run_world

from ddp_lab.config.errors import ConfigError
from ddp_lab.data import worker_count
from ddp_lab.data.dataset import Indexed, InMemory, Samples
from ddp_lab.data.worker_count import (
    Place,
    choose,
    find_number,
    most_in_shared_memory,
    seconds_of_sample,
)
from ddp_lab.data.workers import QUEUES
from ddp_lab.world.process import RankInfo
from ddp_lab.world.ranks import Ranks

ALL = [*range(16)]


def place(
    node: int = 0,
    cpus: list[int] | None = None,
    quota: float | None = None,
    most: int = 99,
    seconds: float | None = 0.001,
) -> Place:
    return Place(node, ALL if cpus is None else cpus, quota, most, seconds)


@pytest.mark.parametrize(
    ("places", "number", "why"),
    [
        # 64 samples of 1 ms in 10 ms: 6.4 processes; 16 CPUs for 2 ranks leave 7
        ([place()] * 2, 7, "takes 64.0 ms; a machine has 16 CPUs for 2 ranks"),
        ([place(seconds=0.0005)] * 2, 4, "more than a batch every 10 ms is not needed"),
        ([place()] * 4, 3, "16 CPUs for 4 ranks"),
        # at most 2 ms for 64 samples
        ([place(seconds=0.00003)] * 2, 0, "takes 1.9 ms, which each rank does itself"),
        # a container with the time of 6 CPUs
        ([place(quota=6.0)] * 2, 2, "6 CPUs for 2 ranks"),
        ([place(quota=1.5)] * 2, 1, "1.5 CPUs for 2 ranks"),
        # a scheduler gives each rank four CPUs of its own
        ([place(cpus=[0, 1, 2, 3]), place(cpus=[4, 5, 6, 7])], 3, "8 CPUs for 2 ranks"),
        # the second machine has fewer CPUs
        ([place(), place(1, [0, 1, 2])], 2, "3 CPUs for 1 rank"),
        # the median of the ranks: one slow disk is not the measure
        ([place(), place(seconds=0.0005), place(seconds=0.0005)], 4, "takes 32.0 ms"),
        ([place(most=3)] * 2, 3, "the batches of 7 do not fit in /dev/shm"),
        ([place(seconds=None)] * 2, 7, "no sample of a stream is tried"),
    ],
)
def test_number_follows_from_cpus_ranks_and_time_of_a_batch(places, number, why):
    chosen, reason = choose([list(each) for each in places], batch_size=64, batches=100)
    assert (chosen, why in reason) == (number, True), reason


def test_number_is_not_above_that_of_the_batches():
    assert choose([list(place())], 64, batches=2)[0] == 2


class Drawing(Samples):
    """Samples that cost a millisecond more each time; every third one cannot be read."""

    def __init__(self):
        self.read: list[int] = []

    @property
    def size(self) -> int:
        return 80

    def sample(self, epoch: int, index: int):
        self.read.append(index)
        if index % 3 == 0:
            raise ConfigError("damaged")
        time.sleep(0.01)
        return torch.zeros(1), torch.zeros(1)

    def subset(self, indices: torch.Tensor, augment: bool):
        raise NotImplementedError


def test_few_samples_of_the_whole_set_are_loaded_and_damaged_ones_left_to_the_training():
    data = Drawing()
    seconds = seconds_of_sample(data)
    assert data.read == [0, 10, 20, 30, 40, 50, 60, 70]
    assert seconds >= 0.01


def test_loading_stops_after_half_a_second(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    data = Drawing()
    monkeypatch.setattr(data, "sample", lambda epoch, index: data.read.append(index))
    assert seconds_of_sample(data) == 1.0
    assert data.read == [0]


def test_generators_are_as_before():
    def read(index: int):
        draws = torch.rand(1), np.random.rand(), random.random()
        return torch.tensor([float(sum(draws))]), torch.tensor(index)

    data = Indexed(read, torch.arange(40), seed=3)
    states = [torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()]
    seconds_of_sample(data)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]


def test_batches_of_all_sets_must_fit_in_shared_memory(monkeypatch):
    """A batch of 4 samples of 1,000 bytes is one page, and one of 4 targets, too."""
    data = InMemory(torch.zeros(9, 250), torch.zeros(9, dtype=torch.int64))
    each = 2 * 4096
    needed = [2 * ((2 * number + 2) * each + QUEUES) for number in range(4)]  # two sets
    for number in (1, 2, 3):
        monkeypatch.setattr(
            worker_count, "free_shared_memory", lambda free=2 * needed[number]: float(free)
        )
        sets = {"train": data, "val": data}
        assert most_in_shared_memory(sets, 4, ranks=2, most=9) == number
    monkeypatch.setattr(worker_count, "free_shared_memory", lambda: 2.0 * needed[1] - 1)
    assert most_in_shared_memory({"train": data, "val": data}, 4, ranks=2, most=9) == 0


def test_samples_in_memory_are_loaded_by_the_rank():
    data = InMemory(torch.zeros(50, 3), torch.zeros(50))
    ranks = Ranks(RankInfo.of({}), timedelta(seconds=10))
    number, why = find_number(ranks, {"train": data}, 4, 12)
    assert number == 0
    assert why.endswith("which each rank does itself")


COSTLY = (
    "device=cpu data=own data.dataset._target_=own_datasets.Costly data.image_size=24 "
    "data.resize=28 data.mean=[0.5] data.std=[0.2] batch_size=6 model=simple_cnn epochs=1 "
    "tracker=none strategy=ddp"
)


def train_with(folder: Path, numbers: list[str]) -> None:
    for number in numbers:
        options = [f"data.num_workers={number}", f"runs_dir={folder}", f"name=workers-{number}"]
        main_in_world(*COSTLY.split(), *options)


def test_run_says_the_number_and_why_and_has_the_result_of_any_other(tmp_path):
    run_world(2, train_with, tmp_path, ["auto", "0"])
    log = (tmp_path / "workers-auto/train.log").read_text()
    assert (
        "data.num_workers=auto: 1 process for each rank: loading a local batch, 3 samples, " in log
    )
    assert "for 2 ranks" in log
    assert "data.num_workers" not in (tmp_path / "workers-0/train.log").read_text()
    auto, none = (read_metrics(tmp_path / f"workers-{number}") for number in ("auto", "0"))
    for name in ("train_loss", "val_loss", "val_accuracy"):
        assert [row[name] for row in auto] == [row[name] for row in none]
