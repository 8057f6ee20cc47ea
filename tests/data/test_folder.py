"""`data=folder`: which files it finds and how it reads them.

Any world, workers and resume get the same images.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from configs import config
from image_folders import write_folder
from launches import ROOT
from torchvision.transforms import v2

from ddp_lab.commands import doctor
from ddp_lab.config.errors import ConfigError, SampleError
from ddp_lab.data.augment import draw_offsets
from ddp_lab.data.batch import LoaderOptions
from ddp_lab.data.dataset import Dataset
from ddp_lab.data.folder import find_images
from ddp_lab.data.images import decode, to_tensor
from ddp_lab.data.loader import DeviceLoader
from ddp_lab.data.workers import WorkerLoader
from ddp_lab.run.build_data import load_dataset
from ddp_lab.world.runtime import Runtime

SIZE = 24
SHORT = 28
OPTIONS = [
    f"data.image_size={SIZE}",
    f"data.resize={SHORT}",
    "data.erasing=0.5",
    "data.randaugment=9",
    "seed=5",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder of 53 training images, 4 to validate with and 7 to test on."""
    return write_folder(tmp_path_factory.mktemp("images"), {"train": 53, "val": 4, "test": 7})


def dataset(root: Path, *overrides: str) -> Dataset:
    return load_dataset(
        config("data=folder", f"data.root={root}", *OPTIONS, *overrides), Runtime("cpu")
    )


def names(part) -> list[str]:
    """Return the names of the files of a set."""
    _, packed, _ = part.read.args
    return [os.fsdecode(packed[number]) for number in part.numbers.tolist()]


def test_files_are_found_in_the_order_of_their_code_points(tmp_path):
    image = (
        write_folder(tmp_path / "one", {"train": 1}, classes=1) / "train" / "class 0" / "0000.png"
    )
    wanted = [
        "train/Z/b.PNG",
        "train/a/10.jpeg",
        "train/a/9.webp",
        "train/a/s/x.jpg",
        "train/link/x.png",
        "train/é/\udcff.png",
    ]
    ignored = [
        "train/a/._9.webp",
        "train/a/.hidden.png",
        "train/a/Thumbs.db",
        "train/.git/a/x.png",
        "train/loose.png",
    ]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "link").symlink_to(tmp_path / "elsewhere")
    for name in wanted + ignored:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, tmp_path / name)
    (tmp_path / "train" / "a" / "loop").symlink_to(tmp_path / "train" / "a")
    assert find_images(tmp_path) == wanted
    loaded = dataset(tmp_path, "data.val_fraction=0.5")
    assert sorted(names(loaded.train) + names(loaded.val)) == wanted


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda root: (root / "train").rename(root / "training"),
            r"has no folder train on .*; expected .*/train/CLASS/FILE",
        ),
        (
            lambda root: (root / "train" / "new").mkdir(),
            r"no image in train/new; expected .*, or add \.jpg.* \(1 are empty\)",
        ),
        (
            lambda root: (root / "test" / "class 0").mkdir(parents=True),
            r"no image in test; expected .* Remove the folder, or",
        ),
        (
            lambda root: (root / "val" / "new").mkdir(),
            r"train and val must have the same classes, but new is in val only",
        ),
        (
            lambda root: (root / "val").rename(root / "Valid"),
            r"the folder Valid would not be used. Rename it to val, or move",
        ),
        ("data.resize=20", r"data.resize=20: must be at least data.image_size=24"),
        (
            "data.crop_scale=[0.5]",
            r"data.crop_scale=\[0.5\]: must be null or the smallest and the largest area",
        ),
        ("data.crop_scale=[0.5,2.0]", r"data.crop_scale=\[0.5, 2.0\]: must be null"),
    ],
)
def test_folders_and_options_that_cannot_be_used_are_refused(tmp_path, damage, message):
    root = write_folder(tmp_path / "images", {"train": 12, "val": 4})
    overrides = [damage] if isinstance(damage, str) else []
    if not overrides:
        damage(root)
    with pytest.raises(ConfigError, match=message):
        dataset(root, *overrides)


def same(one: tuple, other: tuple) -> bool:
    return torch.equal(one[0], other[0]) and one[1] == other[1]


@pytest.mark.parametrize(
    ("folders", "fraction", "sizes"),
    [
        ({"val": 3}, "null", {"train": 24, "val": 3}),
        ({"test": 4}, "null", {"train": 24, "test": 4}),
        ({"test": 4}, "0.25", {"train": 18, "val": 6, "test": 4}),
        ({}, "null", {"train": 22, "val": 2}),
    ],
)
def test_folders_are_the_sets_of_their_names(tmp_path, folders, fraction, sizes):
    loaded = dataset(
        write_folder(tmp_path, {"train": 24, **folders}), f"data.val_fraction={fraction}"
    )
    assert {name: each.size for name, each in loaded.sets.items()} == sizes
    everything = [name for each in loaded.sets.values() for name in names(each)]
    assert sorted(everything) == find_images(tmp_path), "an image is in two sets, or in none"
    assert all(
        name.startswith(f"{split}/") for split in folders for name in names(loaded.sets[split])
    )


@pytest.mark.parametrize("channels", [3, 1])
def test_images_to_evaluate_with_are_the_centres(root, channels):
    loaded = dataset(root, f"data.channels={channels}", "data.mean=[0.5]", "data.std=[0.2]")
    assert loaded.classes == ["class 0", "class 1", "class 2"]
    shape = {"in_channels": channels, "image_size": SIZE, "num_classes": 3}
    assert loaded.model_shape() == shape | {"input_shape": [channels, SIZE, SIZE]}
    centre = v2.Compose([v2.Resize(SHORT, antialias=True), v2.CenterCrop(SIZE)])
    for index, name in enumerate(names(loaded.test)):
        expected = centre(to_tensor(decode(root / name), channels))
        assert same(
            loaded.test.sample(epoch=4, index=index), (expected, int(name.split("/")[1][-1]))
        )


def by_hand(root: Path, name: str, epoch: int, index: int) -> torch.Tensor:
    """Return a training image, computed with torchvision's own composition of the transforms."""
    digest = hashlib.sha256(f"sample seed=5 epoch={epoch} index={index}".encode()).digest()
    fill = [round(255 * value) for value in (0.485, 0.456, 0.406)]
    crop = [
        v2.Resize(SHORT, antialias=True),
        v2.RandomResizedCrop(SIZE, scale=(0.08, 1.0), antialias=True),
    ]
    rest = [
        v2.ToPILImage(),
        v2.RandAugment(magnitude=9),
        v2.PILToTensor(),
        v2.RandomErasing(0.5, value=fill),
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:4], "big"))
        image = v2.Compose([*crop, *rest])(to_tensor(decode(root / name), 3))
    return image.flip(-1) if draw_offsets(53, 0, True, 5, epoch)[2, index] else image


@pytest.fixture(scope="module")
def expected(root) -> dict[int, list[tuple[torch.Tensor, int]]]:
    """The samples of epochs 3 to 5 in the order of training."""
    files = names(dataset(root).train)
    by_epoch = {}
    for epoch in (3, 4, 5):
        order = torch.randperm(53, generator=torch.Generator().manual_seed(5 + epoch)).tolist()
        by_epoch[epoch] = [
            (by_hand(root, files[i], epoch, i), int(files[i].split("/")[1][-1])) for i in order
        ]
    return by_epoch


def loader(
    images, batch_size: int, rank: int = 0, size: int = 1, workers: int = 1, **options
) -> WorkerLoader:
    settings = {"mean": [0.0], "std": [1 / 255], "seed": 5, "num_workers": workers} | options
    return WorkerLoader(
        images,
        LoaderOptions(
            batch_size, dp_rank=rank, dp_size=size, device=torch.device("cpu"), **settings
        ),
    )


def read(of_rank: WorkerLoader) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(batch.inputs.round().to(torch.uint8), batch.targets) for batch in of_rank]


def assert_epoch(loaders: list[WorkerLoader], epoch: int, start: int, expected) -> None:
    """Read the rest of an epoch on all ranks and compare every pixel of every global batch."""
    for of_rank in loaders:
        of_rank.set_epoch(epoch, start)
    wanted = expected[epoch][start:]
    for number, shards in enumerate(zip(*map(read, loaders), strict=True)):
        inputs, targets = (
            torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*shards, strict=True)
        )
        images, labels = zip(*wanted[12 * number : 12 * number + 12], strict=True)
        assert torch.equal(inputs[: len(images)], torch.stack(images))  # padding is at the end
        assert targets[: len(labels)].tolist() == list(labels)
    assert number == (53 - start - 1) // 12


@pytest.mark.parametrize(
    ("size", "workers"),
    [
        pytest.param(1, 0, marks=pytest.mark.slow),
        pytest.param(3, 1, marks=pytest.mark.slow),
        (2, 2),
    ],
)
def test_images_are_the_same_for_any_world_workers_and_resume(root, expected, size, workers):
    images = dataset(root).train
    loaders = [
        loader(images, 12, rank, size, workers, shuffle=True, flip=True) for rank in range(size)
    ]
    before = torch.get_rng_state()
    assert_epoch(loaders, 3, 24, expected)  # resumed after two steps
    assert_epoch(loaders, 4, 0, expected)
    for of_rank in loaders:
        of_rank.set_epoch(5)
        next(iter(of_rank))  # abandoned after its first batch
    assert_epoch(loaders, 5, 0, expected)
    assert_epoch(loaders, 3, 48, expected)
    assert torch.equal(torch.get_rng_state(), before), "loading draws from the global generator"


KEPT = """
import sys, torch
from ddp_lab.data.datasets import Synthetic
from ddp_lab.data.batch import LoaderOptions
from ddp_lab.data.workers import WorkerLoader
options = LoaderOptions(
    2, 0, 1, torch.device("cpu"), mean=[0.5], std=[0.2], shuffle=True, num_workers=1
)
loader = WorkerLoader(Synthetic(8, 2, 1, 4, 2).load().train, options)
batches = iter(loader)
next(batches)
sys.modules["keeps"] = loader  # until the interpreter exits, like the frames of an exception
sys.exit(2)
"""


@pytest.mark.slow
def test_interpreter_exits_while_workers_run():
    ended = subprocess.run(
        [sys.executable, "-c", KEPT], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert ended.returncode == 2, ended.stderr


def test_what_cannot_be_loaded_is_reported(tmp_path):
    root = write_folder(tmp_path, {"train": 4, "test": 4}, classes=1)
    loaded = dataset(root)
    with pytest.raises(
        ConfigError,
        match=r"data.loader=device: is not supported by samples that are read one by one",
    ):
        DeviceLoader(
            loaded.train,
            LoaderOptions(4, 0, 1, torch.device("cpu"), mean=[0.0], std=[1.0], shuffle=True),
        )
    os.truncate(root / names(loaded.test)[2], 50)
    with pytest.raises(
        SampleError,
        match=rf"^{root}/test/class 0/.*: cannot be decoded .*Remove it; `ddp-lab doctor`",
    ):
        next(iter(loader(loaded.test, 4, shuffle=False)))


def test_doctor_names_all_files_that_cannot_be_decoded(command, tmp_path):
    root = write_folder(tmp_path / "images", {"train": 4, "test": 4}, classes=1)
    arguments = [
        "data=folder",
        f"data.root={root}",
        "data.image_size=16",
        "model=simple_cnn",
        "device=cpu",
        f"runs_dir={tmp_path}",
    ]
    code, output, errors = command(doctor.main, *arguments)
    assert (code, "train 4, test 4 images of 3x16x16, 1 class" in output) == (0, True), errors
    os.truncate(root / "test" / "class 0" / "0002.webp", 50)
    (root / "train" / "class 0" / "a.png").symlink_to("a.png")
    code, output, errors = command(doctor.main, *arguments)
    assert code == 2
    assert "2 of 9 files cannot be decoded. Remove them: " in errors
    assert all(f"/class 0/{name}: cannot be decoded" in errors for name in ("0002.webp", "a.png"))
