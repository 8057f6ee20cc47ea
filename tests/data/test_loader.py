"""The loaders: the same batches for any ranks, loader, resume and CUDA graph."""

from itertools import chain, product

import pytest
import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.augment import draw_offsets
from ddp_lab.data.batch import LoaderOptions
from ddp_lab.data.dataset import InMemory
from ddp_lab.data.loader import Loader, loader_class


def numbered(samples: int) -> InMemory:
    """Return images of two pixels that encode the sample's number."""
    numbers = torch.arange(samples)
    images = (
        torch.stack([numbers % 256, numbers // 256], dim=1).to(torch.uint8).view(samples, 1, 1, 2)
    )
    return InMemory(images, numbers % 10)


def pictures() -> InMemory:
    """Return 103 different images of three channels, 5 pixels high and 7 wide.

    No pixel is 0, the border's value.
    """
    images = torch.randint(
        1, 256, (103, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return InMemory(images, torch.arange(103) % 10)


def loader(
    kind: str, rank: int, size: int, data: InMemory | None = None, batch_size: int = 24, **other
) -> Loader:
    settings = {"mean": [0.0], "std": [1 / 255], "seed": 5, "shuffle": True} | other
    options = LoaderOptions(
        batch_size, dp_rank=rank, dp_size=size, device=torch.device("cpu"), **settings
    )
    return loader_class(kind)(data or numbered(103), options)


def read(loader_of_rank: Loader, epoch: int) -> list[tuple[list[int], int]]:
    """Return the numbers of the samples without padding and the global size of each batch."""
    loader_of_rank.set_epoch(epoch)
    batches = []
    for inputs, targets, global_size in loader_of_rank:
        numbers = (inputs[:, 0, 0, 0] + 256 * inputs[:, 0, 0, 1]).round().long()
        real = slice(
            len(range(loader_of_rank.options.dp_rank, global_size, loader_of_rank.options.dp_size))
        )
        assert torch.equal(targets[real], numbers[real] % 10), (
            "a target does not belong to its image"
        )
        batches.append((numbers[real].tolist(), global_size))
    return batches


def read_world(kind: str, size: int, epoch: int, **settings) -> list[list[int]]:
    """Return the global batches: the samples that all ranks read in the same step, sorted."""
    shards = [read(loader(kind, rank, size, **settings), epoch) for rank in range(size)]
    steps = [
        (sorted(chain(*(numbers for numbers, _ in parts))), {n for _, n in parts})
        for parts in zip(*shards, strict=True)
    ]
    assert all(counts == {len(numbers)} for numbers, counts in steps), (
        "a global_size is not the size of the global batch"
    )
    return [numbers for numbers, _ in steps]


@pytest.mark.parametrize("kind", ["device", "workers"])
@pytest.mark.parametrize("samples", [103, 97, 96, 21, 3, 1])
@pytest.mark.parametrize("shuffle", [True, False])
def test_global_batches_are_the_same_for_any_world_size(kind, samples, shuffle):
    for epoch, size in product((0, 3), (1, 2, 3, 4, 8)):
        order = torch.arange(samples)
        if shuffle:
            order = torch.randperm(samples, generator=torch.Generator().manual_seed(5 + epoch))
        expected = [sorted(batch.tolist()) for batch in order.split(24)]
        assert read_world(kind, size, epoch, data=numbered(samples), shuffle=shuffle) == expected


def moved(image: torch.Tensor, dy: int, dx: int, flip: bool) -> torch.Tensor:
    """Return what `augment` should do to one image, computed pixel by pixel."""
    _, height, width = image.shape
    result = torch.zeros_like(image)
    for y, x in product(range(height), range(width)):
        if 0 <= y - dy < height and 0 <= x - dx < width:
            result[:, y, x] = image[:, y - dy, width - 1 - (x - dx) if flip else x - dx]
    return result


def images_of_world(kind: str, size: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rest of epoch 3 in the order of the permutation.

    Kind `graph` reads it as a CUDA graph does.
    """
    ranks = []
    for rank in range(size):
        loader_of_rank = loader(
            "device" if kind == "graph" else kind, rank, size, pictures(), crop_padding=2, flip=True
        )
        if kind == "graph":
            loader_of_rank.set_epoch(2)
            loader_of_rank.prefetch_epoch()
            drawn = loader_of_rank._drawn[3]
        loader_of_rank.set_epoch(3, start)
        loader_of_rank.start_epoch()
        assert kind != "graph" or loader_of_rank._drawn[3] is drawn, (
            "a prefetched epoch is drawn again"
        )
        ranks.append(
            list(loader_of_rank)
            if kind != "graph"
            else [loader_of_rank.next_batch(each) for each in loader_of_rank.counts()]
        )
    steps = [
        [torch.stack(parts, dim=1).flatten(0, 1) for parts in list(zip(*step, strict=True))[:2]]
        for step in zip(*ranks, strict=True)
    ]
    inputs, targets = (torch.cat(parts) for parts in zip(*steps, strict=True))
    return inputs[: 103 - start], targets[: 103 - start]  # padding is at the end


@pytest.mark.parametrize("kind", ["device", "workers", "graph"])
@pytest.mark.parametrize("start", [0, 48])
def test_augmentation_is_the_same_for_any_world_size_and_loader(kind, start):
    data = pictures()
    order = torch.randperm(103, generator=torch.Generator().manual_seed(5 + 3))
    offsets = draw_offsets(103, 2, True, seed=5, epoch=3).T.tolist()
    assert offsets != draw_offsets(103, 2, True, seed=5, epoch=4).T.tolist(), (
        "every epoch augments alike"
    )
    expected = torch.stack([moved(data.inputs[i], *offsets[i]) for i in order.tolist()])
    for size in (1, 2, 3, 4):
        inputs, targets = images_of_world(kind, size, start)
        assert torch.equal(inputs.round().to(torch.uint8), expected[start:])
        assert torch.equal(targets, data.targets[order[start:]])


def test_resume_at_samples_that_the_replicas_do_not_divide_is_refused():
    message = (
        "25 samples into an epoch, which is not divisible by 2 replicas; use the batch_size of the "
        "run"
    )
    loader("device", 0, 1, pictures()).set_epoch(1, 25)
    with pytest.raises(ConfigError, match=message):
        loader("device", 0, 2, pictures()).set_epoch(1, 25)
