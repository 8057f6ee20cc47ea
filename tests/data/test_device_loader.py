"""The loader whose samples are on the device: its order, and the calls that a CUDA graph makes."""

import pytest
import torch
from torch.utils.data import DistributedSampler

from ddp_lab.data.datasets import Synthetic
from ddp_lab.data.loader import DeviceLoader, LoaderOptions, Shard


@pytest.mark.parametrize(("size", "ranks"), [(101, 3), (96, 4), (2, 4)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_shard_indices_equal_those_of_distributed_sampler(size, ranks, shuffle):
    for rank in range(ranks):
        sampler = DistributedSampler(range(size), ranks, rank, shuffle=shuffle, seed=3)
        sampler.set_epoch(5)
        assert Shard(size, rank, ranks, shuffle, seed=3).order(5).tolist() == list(sampler)


@pytest.mark.parametrize("augmented", [False, True])
def test_prefetch_epoch_draws_the_next_epoch(augmented, monkeypatch):
    expected = taken(augmented)
    expected.set_epoch(4)
    expected.start_epoch()
    loader = taken(augmented)
    loader.set_epoch(3, 48)
    loader.prefetch_epoch()
    loader.set_epoch(4)
    for name in ("randperm", "randint"):
        monkeypatch.setattr(torch, name, None)
    loader.start_epoch()
    for size in loader.batch_sizes():
        assert all(map(torch.equal, loader.next_batch(size)[:2], expected.next_batch(size)[:2]))


def taken(augmented: bool) -> DeviceLoader:
    data = Synthetic(101, 8, 1, 8, 10).load().train
    options = {"dp_rank": 1, "dp_size": 2, "device": torch.device("cpu"), "mean": [0.5], "std": [0.2], "shuffle": True}
    return DeviceLoader(data, LoaderOptions(24, **options, **({"crop_padding": 2, "flip": True} if augmented else {})))


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("samples", [0, 48])
def test_next_batch_returns_the_batches_of_iterating(samples, augmented):
    """A graph reads the same batches as the eager loop, also from the middle of an epoch."""
    loader = taken(augmented)
    loader.set_epoch(3, samples)
    eager = list(loader)
    loader.start_epoch()
    sizes = list(loader.batch_sizes())
    assert len(sizes) == len(eager) == 5 - samples // 24
    for size, batch in zip(sizes, eager, strict=True):
        inputs, targets, count = loader.next_batch(size)
        assert count == batch.count
        assert torch.equal(inputs, batch.inputs)
        assert torch.equal(targets, batch.targets)
