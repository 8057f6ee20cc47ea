import os
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from configs import config

from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.data.augment import augment, draw_offsets
from ddp_lab.data.batch import IGNORE
from ddp_lab.data.datasets import Digits, Synthetic, Torchvision
from ddp_lab.data.loader import LoaderOptions
from ddp_lab.data.samples import LabelledImages
from ddp_lab.run.job import LOADERS, build
from ddp_lab.world.runtime import Runtime


def numbered(samples: int) -> LabelledImages:
    """Return images of two pixels that encode the sample's number."""
    numbers = torch.arange(samples)
    images = torch.stack([numbers % 256, numbers // 256], dim=1).to(torch.uint8).view(samples, 1, 1, 2)
    return LabelledImages(images, numbers % 10)


def loader(
    kind: str,
    rank: int,
    size: int,
    *,
    samples: int = 103,
    data: LabelledImages | None = None,
    batch_size: int = 24,
    shuffle: bool = True,
    **other,
):
    settings = {"mean": [0.0], "std": [1 / 255], "seed": 5, "shuffle": shuffle} | other
    options = LoaderOptions(batch_size, dp_rank=rank, dp_size=size, device=torch.device("cpu"), **settings)
    return LOADERS[kind](data or numbered(samples), options)


def read(loader, epoch: int, start: int = 0) -> list[list[int]]:
    """Return the numbers of the samples without padding, batch by batch, from `start` samples into the epoch."""
    loader.set_epoch(epoch, start)
    batches = []
    for inputs, targets, _ in loader:
        numbers = (inputs[:, 0, 0, 0] + 256 * inputs[:, 0, 0, 1]).round().long()
        real = targets != IGNORE
        assert torch.equal(targets[real], numbers[real] % 10), "a target does not belong to its image"
        batches.append(numbers[real].tolist())
    return batches


def read_world(size: int, kind: str = "device", epoch: int = 0, start: int = 0, **settings) -> list[list[int]]:
    """Return the global batches: the samples that all ranks read in the same step, sorted."""
    shards = [read(loader(kind, rank, size, **settings), epoch, start) for rank in range(size)]
    return [sorted(chain.from_iterable(parts)) for parts in zip(*shards, strict=True)]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["device", "workers"])
@pytest.mark.parametrize("samples", [103, 97, 96, 21])
def test_loader_reads_the_same_global_batches_for_any_world_size(size, kind, samples):
    for epoch in (0, 3):
        assert read_world(size, kind, epoch, samples=samples) == read_world(1, "device", epoch, samples=samples)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["device", "workers"])
@pytest.mark.parametrize("steps", [1, 4, 5])
def test_loader_resumes_within_an_epoch_for_any_world_size(size, kind, steps):
    whole = read_world(1, epoch=3)
    assert len(whole) == 5
    assert read_world(size, kind, epoch=3, start=min(103, steps * 24)) == whole[steps:]
    again = loader(kind, 0, size)
    read(again, epoch=3, start=48)
    assert read(again, epoch=4) == read(loader("device", 0, size), epoch=4), "the next epoch is complete again"


def test_set_epoch_refuses_samples_not_divisible_by_the_replicas():
    with pytest.raises(ConfigError, match=r"25 samples into epoch 1, which is not divisible by 2 replicas; use the batch_size"):
        loader("device", 0, 2).set_epoch(1, 25)


@pytest.mark.parametrize("rank", [0, 2])
def test_device_and_workers_loaders_yield_equal_tensors(rank):
    settings = {"samples": 103, "mean": [0.3], "std": [0.7]}
    one, other = (list(loader(kind, rank, 3, **settings)) for kind in ("device", "workers"))
    assert len(one) == len(other) == 5
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)
        assert a.count == b.count


def test_workers_loader_keeps_the_order_with_several_processes():
    assert read(loader("workers", 1, 3, num_workers=2), epoch=1) == read(loader("device", 1, 3), epoch=1)


def test_permutation_depends_on_epoch_and_seed_only():
    first = read_world(2, epoch=0)
    assert read_world(2, epoch=1) != first
    assert read_world(2, epoch=0, seed=6) != first
    assert read_world(2, epoch=0) == first


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("samples", [1, 3, 100, 103])
def test_loader_without_shuffle_reads_every_sample_once(size, samples):
    batches = read_world(size, samples=samples, batch_size=7 * size, shuffle=False)
    assert sorted(chain.from_iterable(batches)) == list(range(samples))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_batch_count_is_the_size_of_the_global_batch(size):
    for rank in range(size):
        assert [batch.count for batch in loader("device", rank, size, samples=50)] == [24, 24, 2]


AUGMENTED = {"crop_padding": 2, "flip": True}


def pictures() -> LabelledImages:
    """Return 103 different images of three channels, 5 pixels high and 7 wide, without a pixel of 0, the border's value."""
    images = torch.randint(1, 256, (103, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return LabelledImages(images, torch.arange(103) % 10)


def moved(image: torch.Tensor, dy: int, dx: int, flip: bool) -> torch.Tensor:
    """Return what `augment` should do to one image, computed pixel by pixel."""
    _, height, width = image.shape
    result = torch.zeros_like(image)
    for y in range(height):
        for x in range(width):
            if 0 <= y - dy < height and 0 <= x - dx < width:
                result[:, y, x] = image[:, y - dy, width - 1 - (x - dx) if flip else x - dx]
    return result


def test_augment_shifts_and_flips_every_image_separately():
    moves = [(dy, dx, flip) for dy in range(-4, 5) for dx in range(-6, 7) for flip in (0, 1)]
    images = pictures().images[torch.arange(len(moves)) % 103]
    dy, dx, flip = torch.tensor(moves).T
    expected = torch.stack([moved(image, *move) for image, move in zip(images, moves, strict=True)])
    for _ in range(1):
        result = augment(images, torch.stack([dy, dx, flip]))
        assert result.dtype == torch.uint8
        assert result.is_contiguous()
        assert torch.equal(result, expected)


def test_draw_depends_on_epoch_and_seed_only():
    first = draw_offsets(1000, 2, True, seed=5, epoch=1)
    assert torch.equal(draw_offsets(1000, 2, True, seed=5, epoch=1), first)
    for seed, epoch in [(5, 2), (6, 1), (6, 0), (5 + 2**31, 1)]:
        assert (draw_offsets(1000, 2, True, seed, epoch) != first).any(dim=1).all()
    dy, dx, flip = first
    assert dy.unique().tolist() == dx.unique().tolist() == [-2, -1, 0, 1, 2]
    assert not torch.equal(dy, dx)
    assert 400 < flip.sum() < 600
    assert draw_offsets(1000, 0, True, 5, 1)[:2].count_nonzero() == 0
    assert draw_offsets(1000, 2, False, 5, 1)[2].count_nonzero() == 0


def images_of_world(size: int, kind: str, epoch: int, start: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the global batches in the order of the permutation; kind `dealt` reads them with `take`, as a CUDA graph does."""
    ranks = []
    for rank in range(size):
        own = loader("device" if kind == "dealt" else kind, rank, size, data=pictures(), **AUGMENTED)
        own.set_epoch(epoch, start)
        if kind == "dealt":
            own.start_epoch()
            ranks.append([own.next_batch(size)[:2] for size in own.batch_sizes()])
        else:
            ranks.append([(inputs, targets) for inputs, targets, _ in own])
    batches = []
    for shards in zip(*ranks, strict=True):
        inputs, targets = (torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*shards, strict=True))
        batches.append((inputs[targets != IGNORE], targets[targets != IGNORE]))
    return batches


@pytest.mark.parametrize("kind", ["device", "workers", "dealt"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("start", [0, 48, 96])
def test_augmentation_is_the_same_for_any_world_size_and_loader(kind, size, start):
    data, order = pictures(), torch.randperm(103, generator=torch.Generator().manual_seed(5 + 3))
    moves = draw_offsets(103, **AUGMENTED, seed=5, epoch=3).T.tolist()
    expected = torch.stack([moved(data.images[i], *moves[i]) for i in order.tolist()])
    batches = images_of_world(size, kind, epoch=3, start=start)
    assert [len(targets) for _, targets in batches] == [24, 24, 24, 24, 7][start // 24 :]
    assert torch.equal(torch.cat([inputs for inputs, _ in batches]).round().to(torch.uint8), expected[start:])
    assert torch.equal(torch.cat([targets for _, targets in batches]), data.targets[order[start:]])


@pytest.mark.parametrize("kind", ["device", "workers", "dealt"])
def test_augmentation_differs_between_epochs(kind):
    def by_target(epoch: int) -> torch.Tensor:
        (inputs, targets), *_ = images_of_world(1, kind, epoch)
        return inputs[targets.argsort(stable=True)]

    assert torch.equal(by_target(3), by_target(3))
    assert not torch.equal(by_target(3), by_target(4))


@pytest.mark.parametrize("kind", ["device", "workers"])
def test_loader_leaves_images_unchanged_without_augmentation(kind):
    data, own = pictures(), loader(kind, 1, 2, data=pictures())
    seen = torch.cat([inputs for inputs, _, _ in own]).round().to(torch.uint8)
    assert torch.equal(seen, data.images[own.shard.order(0)])


@pytest.mark.parametrize("kind", ["device", "workers"])
def test_job_augments_the_training_split_only(kind):
    cfg = config("data.crop_padding=3", "data.flip=true", f"data.loader={kind}", "data.num_workers=0")
    job = build(cfg, Runtime("cpu"))
    for loader, data, augmented in zip(job.loaders.values(), (job.dataset.train, job.dataset.test), (True, False), strict=True):
        seen = torch.cat([inputs for inputs, _, _ in loader])
        assert torch.equal(seen, loader.normalise(data.images[loader.shard.order(0)])) is not augmented


@pytest.mark.parametrize(("padding", "allowed"), [(5, "0 to 4"), (7, "0 to 4")])
def test_loader_refuses_crop_padding_as_large_as_the_image(padding, allowed):
    loader("device", 0, 1, data=pictures(), crop_padding=4)
    with pytest.raises(ConfigError, match=rf"data.crop_padding={padding}: .* 5 x 7 pixels; allowed: {allowed}"):
        loader("device", 0, 1, data=pictures(), crop_padding=padding)


def test_loader_normalises_with_mean_and_std():
    data = LabelledImages(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1), torch.tensor([0, 1]))
    (batch,) = loader("device", 0, 1, data=data, mean=[0.5], std=[0.25], shuffle=False)
    assert batch.inputs.flatten().tolist() == pytest.approx([-2.0, 2.0])


def test_loader_refuses_means_that_do_not_fit_the_channels():
    with pytest.raises(ConfigError, match=r"data.mean=\[0.1, 0.2\]: has 2 values; expected 1, or 1 per channel"):
        loader("device", 0, 1, mean=[0.1, 0.2])


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    dataset = Digits().load()
    assert dataset.train.images.shape == (1437, 1, 28, 28)
    assert dataset.test.images.shape == (360, 1, 28, 28)
    assert dataset.train.images.dtype == torch.uint8
    bunch, order = load_digits(), torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    small = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    images = (F.interpolate(small, size=28, mode="bilinear", align_corners=False) * 255).round().to(torch.uint8)
    assert torch.equal(torch.cat([dataset.train.images, dataset.test.images]), images[order])
    assert torch.equal(torch.cat([dataset.train.targets, dataset.test.targets]), torch.tensor(bunch.target)[order])
    assert dataset.model_shape() == {"in_channels": 1, "image_size": 28, "num_classes": 10}


def test_synthetic_has_the_requested_shape():
    dataset = Synthetic(20, 10, 3, 8, 4).load()
    assert dataset.train.images.shape == (20, 3, 8, 8)
    assert len(dataset.test.targets) == 10
    assert dataset.model_shape() == {"in_channels": 3, "image_size": 8, "num_classes": 4}
    assert torch.equal(dataset.train.images, Synthetic(20, 10, 3, 8, 4).load().train.images)


def write_idx(path, magic: int, data: torch.Tensor) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in data.shape)
    path.write_bytes(magic.to_bytes(4, "big") + sizes + data.numpy().tobytes())


def test_torchvision_reads_raw_files_without_network(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, size in (("train", 6), ("t10k", 3)):
        write_idx(raw / f"{part}-images-idx3-ubyte", 2051, torch.arange(size * 4, dtype=torch.uint8).view(size, 2, 2))
        write_idx(raw / f"{part}-labels-idx1-ubyte", 2049, torch.arange(size, dtype=torch.uint8))
    source = Torchvision("FashionMNIST", str(tmp_path))
    source.prepare()
    dataset = source.load()
    assert dataset.train.images.flatten().tolist() == list(range(24))
    assert dataset.test.targets.tolist() == [0, 1, 2]
    assert dataset.classes[0] == "T-shirt/top"


def test_torchvision_reports_directory_files_and_remedy_for_missing_data(tmp_path, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", no_network)
    with pytest.raises(NodeError) as error:
        Torchvision("FashionMNIST", str(tmp_path)).prepare()
    message = str(error.value)
    assert "\n" not in message
    for part in (f"data.root={tmp_path}", "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte", "data=digits"):
        assert part in message
    assert os.listdir(tmp_path) == [], "a failed download left something behind"


def no_network(*args, **kwargs):
    raise OSError("no network in this test")


@pytest.mark.skipif(
    "not __import__('os').path.isdir('../shared/data/FashionMNIST')", reason="FashionMNIST is not in ../shared/data"
)
def test_torchvision_reads_the_real_fashion_mnist():
    source = Torchvision("FashionMNIST", "../shared/data")
    source.prepare()
    dataset = source.load()
    assert dataset.train.images.shape == (60000, 1, 28, 28)
    assert dataset.test.targets.bincount().tolist() == [1000] * 10
