"""The datasets that are held in memory, and their sizes, which the planner reads without them."""

import os

import pytest
import torch
import torch.nn.functional as F
from configs import config
from small_digits import ALL_DIGITS

from ddp_lab.advise.plan import dataset_sizes
from ddp_lab.config.errors import NodeError
from ddp_lab.data.datasets import Digits, Torchvision
from ddp_lab.run.build_data import load_dataset
from ddp_lab.world.runtime import Runtime


@pytest.fixture
def all_digits(monkeypatch):
    monkeypatch.setenv(ALL_DIGITS, "1")


@pytest.mark.slow  # importing scikit-learn takes 2 s
@pytest.mark.usefixtures("all_digits")
def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    dataset = Digits().load()
    assert dataset.train.inputs.shape == (1437, 1, 28, 28)
    assert dataset.test.inputs.shape == (360, 1, 28, 28)
    assert dataset.train.inputs.dtype == torch.uint8
    bunch = load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    small = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    images = (
        (F.interpolate(small, size=28, mode="bilinear", align_corners=False) * 255)
        .round()
        .to(torch.uint8)
    )
    assert torch.equal(torch.cat([dataset.train.inputs, dataset.test.inputs]), images[order])
    assert torch.equal(
        torch.cat([dataset.train.targets, dataset.test.targets]), torch.tensor(bunch.target)[order]
    )
    shape = {"in_channels": 1, "image_size": 28, "num_classes": 10}
    assert dataset.model_shape() == shape | {"input_shape": [1, 28, 28]}


def write_idx(path, magic: int, data: torch.Tensor) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in data.shape)
    path.write_bytes(magic.to_bytes(4, "big") + sizes + data.numpy().tobytes())


def test_torchvision_reads_raw_files_without_network(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, size in (("train", 6), ("t10k", 3)):
        write_idx(
            raw / f"{part}-images-idx3-ubyte",
            2051,
            torch.arange(size * 4, dtype=torch.uint8).view(size, 2, 2),
        )
        write_idx(raw / f"{part}-labels-idx1-ubyte", 2049, torch.arange(size, dtype=torch.uint8))
    source = Torchvision("FashionMNIST", str(tmp_path))
    dataset = source.load()
    assert dataset.train.inputs.flatten().tolist() == list(range(24))
    assert dataset.test.targets.tolist() == [0, 1, 2]
    assert dataset.classes[0] == "T-shirt/top"


def test_torchvision_reports_directory_files_and_remedy_for_missing_data(tmp_path, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", no_network)
    with pytest.raises(NodeError) as error:
        Torchvision("FashionMNIST", str(tmp_path)).load()
    message = str(error.value)
    assert "\n" not in message
    for part in (
        f"data.root={tmp_path}",
        "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte",
        "data=digits",
    ):
        assert part in message
    assert os.listdir(tmp_path) == [], "a failed download left something behind"


def no_network(*args, **kwargs):
    raise OSError("no network in this test")


@pytest.mark.parametrize(
    "overrides",
    [["data=digits"], ["data=synthetic", "data.dataset.image_size=8", "data.val_fraction=0.2"]],
)
def test_sizes_without_the_samples_are_those_of_the_dataset(overrides):
    cfg = config(*overrides)
    loaded = load_dataset(cfg, Runtime("cpu"))
    planned = dataset_sizes(cfg.data)
    assert planned.train.inputs.is_meta
    assert planned.describe_sets() == loaded.describe_sets()
    assert (planned.train.shape, planned.model_shape()) == (
        loaded.train.shape,
        loaded.model_shape(),
    )
    assert planned.train.inputs.nbytes == loaded.train.inputs.nbytes
    assert dataset_sizes(config("data=folder", "data.root=nowhere").data) is None


@pytest.mark.parametrize(
    ("name", "sizes", "shape"),
    [
        ("mnist", (60_000, 10_000), (1, 28, 28)),
        ("fashion_mnist", (60_000, 10_000), (1, 28, 28)),
        ("cifar10", (50_000, 10_000), (3, 32, 32)),
    ],
)
def test_sizes_of_datasets_that_are_downloaded_are_those_of_their_authors(name, sizes, shape):
    planned = dataset_sizes(config(f"data={name}", "data.val_fraction=0").data)
    assert (planned.train.size, planned.test.size) == sizes
    assert (tuple(planned.train.shape), len(planned.classes)) == (shape, 10)


@pytest.mark.usefixtures("all_digits")
def test_digits_have_the_mean_of_scikit_learns_pixels():
    """Their mean is 4.884 of 16; resizing keeps it nearly."""
    dataset = Digits().load()
    mean = torch.cat([dataset.train.inputs, dataset.test.inputs]).double().mean().item()
    assert mean == pytest.approx(4.884 / 16 * 255, rel=0.01)
