"""`data=own`: map-style datasets, and `data=hf`: datasets of the package `datasets`.

Nothing is downloaded.
"""

import os
import sys
from typing import Any

import own_datasets
import pytest
import torch
from configs import config
from image_folders import write_folder
from omegaconf import DictConfig, OmegaConf
from worlds import run_world

from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError, SampleError
from ddp_lab.data.dataset import Dataset, InMemory, require_same_data
from ddp_lab.run.build import build
from ddp_lab.run.build_data import load_dataset, make_source
from ddp_lab.world.runtime import Runtime

OPTIONS = ["data=own", "data.image_size=24", "data.resize=24", "data.num_workers=0"]


def checked(target: str, *overrides: str) -> DictConfig:
    cfg = config(*OPTIONS, f"data.dataset._target_=own_datasets.{target}", *overrides)
    check(cfg)
    return cfg


def load(target: str, *overrides: str) -> Dataset:
    return load_dataset(checked(target, *overrides), Runtime("cpu"))


def test_random_numbers_of_a_dataset_depend_on_seed_epoch_and_index():
    train, other = (load("Shapes", f"seed={seed}").train for seed in (5, 6))
    first = train.sample(1, 3)[0]
    assert torch.equal(train.sample(1, 3)[0], first)
    for changed in (train.sample(2, 3), train.sample(1, 6), other.sample(1, 3)):
        assert not torch.equal(changed[0], first)
    val = load("Shapes").val
    assert torch.equal(val.sample(0, 3)[0], val.sample(0, 3)[0])


def test_tensors_stay_as_they_are_and_images_of_pillow_are_augmented_in_training_only():
    masks = load("Masks")
    image, mask = own_datasets.Masks("train")[5]
    assert same(masks.train.sample(0, 5), (image, mask))
    inputs, targets = masks.train.example(2, "meta")
    assert (inputs.shape, inputs.dtype) == ((2, 3, 8, 8), torch.float32)
    assert (targets.shape, targets.dtype) == ((2, 8, 8), torch.int64)
    dataset = load("Shapes", "data.erasing=1", "data.mean=[1.0]")
    erased, whole = (each.sample(0, 0)[0] == 255 for each in (dataset.train, dataset.val))
    assert erased.any()
    assert not whole.any()
    numbers = load("numbers")
    assert isinstance(numbers.train, InMemory)
    assert numbers.classes == []


def same(one: tuple, other: tuple) -> bool:
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            "Tensors data.crop_scale=[0.5,1]",
            r"data.crop_scale, .* are for images of Pillow, .* tensors of torch.uint8\. Use",
        ),
        (
            "numbers data.erasing=0.5",
            r"data.erasing are for images of Pillow, .* tensors of torch.float32\. Use",
        ),
        ("Tensors label=2", r"the target of sample 0 is 2; with 2 classes it must be 0 to 1"),
        (
            "Wrong how=word",
            r"sample 0: targets is str\. Text must become numbers, for example those of tokens or "
            "of a class",
        ),
        (
            "Wrong how=outline",
            r"sample 0 is \[30, 40\], but would not be resized with its image of Pillow\. Return "
            "both",
        ),
        (
            "Wrong how=empty",
            "Wrong: must be a map-style dataset, with __len__, __getitem__ and at least one "
            "sample$",
        ),
        ("Wrong how=alone", r"sample 0 must be \(input, target\), got Image"),
        (
            "Wrong how=constructor",
            r"cannot be constructed with split=train: OSError: no images \(own_datasets.py, line "
            r"\d+\)$",
        ),
        ("Wrong how=sample", r"sample 0 cannot be read: KeyError: 0 \(own_datasets.py, line \d+\)"),
        (
            "Tested",
            r"with split=val: ValueError: val .*\)\. data.val_split is the name of this split; "
            "null: there is none",
        ),
        (
            "Shapes siz=3",
            r"data.dataset.siz=3: there is no such key; did you mean data.dataset.size",
        ),
        ("Tensors train=true", r"data.dataset.train=True: there is no such key"),
        (
            "nothing",
            r"data.dataset._target_=own_datasets.nothing: must be the name of a class or function",
        ),
    ],
)
def test_datasets_that_cannot_be_used_are_refused(dataset, message):
    target, *options = dataset.split()
    with pytest.raises(ConfigError, match=message):
        load(
            target,
            "data.num_classes=2",
            *(word if "." in word else f"+data.dataset.{word}" for word in options),
        )


def test_label_that_is_wrong_in_a_later_sample_is_named():
    """The error of a worker process is the message, without a traceback."""
    loader = build(
        checked("Wrong", "+data.dataset.how=later", "data.num_classes=3", "data.num_workers=1"),
        Runtime("cpu"),
    ).loaders["val"]
    with pytest.raises(
        SampleError,
        match=r"^data.dataset._target_=own_datasets.Wrong: the target of sample 4 is 6; .*$",
    ):
        list(loader)


def test_sets_and_classes_are_those_of_the_dataset_or_held_out():
    dataset = load("Shapes", "+data.dataset.size=10")
    assert (dataset.train.size, dataset.val.size, dataset.test) == (10, 7, None)
    assert (dataset.classes, dataset.val.sample(0, 5)[1]) == (["dark", "light", "red"], 2)
    tested = ["Tested", "data.val_split=null", "data.test_split=test"]
    dataset = load(*tested)
    assert (dataset.train.size, dataset.val, dataset.test.size) == (20, None, 7)
    held_out = load(*tested, "data.val_fraction=0.25")
    assert held_out.test.size == 7
    assert sorted(held_out.train.numbers.tolist() + held_out.val.numbers.tolist()) == list(
        range(20)
    )
    with pytest.raises(
        ConfigError, match=r"data.val_fraction=0.25: the dataset has a validation set already"
    ):
        load("Shapes", "data.val_fraction=0.25")


def test_map_style_dataset_needs_data_own():
    cfg = config("data.dataset._target_=own_datasets.Shapes")
    with pytest.raises(ConfigError, match=r"must have the method load; .* needs data=own"):
        load_dataset(cfg, Runtime("cpu"))


def test_ranks_with_other_files_are_refused():
    sizes = {"train": 3}
    require_same_data([("a", sizes), ("a", sizes)])
    complete = load("Tokens", "data.num_classes=11")
    less = load("Tokens", "data.num_classes=12")
    with pytest.raises(ConfigError, match=r"rank 1 has other files"):
        require_same_data([(complete.digest, sizes), (less.digest, sizes)])
    with pytest.raises(ConfigError, match=r"rank 2 has other files than rank 0 \(1 rank in all\)"):
        require_same_data([("a", sizes), ("a", sizes), ("b", sizes)])
    for name in ("train", "val"):
        message = (
            f"the {name} set has 2 samples on rank 1, but 3 on rank 0. Load the complete set on "
            "every rank"
        )
        full = {"train": 3, "val": 3}
        with pytest.raises(ConfigError, match=message):
            require_same_data([("a", full), ("a", full | {name: 2})])
    tokens = load("Tokens", "data.num_classes=11")
    assert (tokens.train.size, tokens.val.size, tokens.test) == (36, 4, None)
    assert tokens.model_shape() == {
        "input_shape": [8],
        "num_classes": 11,
        "vocabulary": 11,
        "context": 8,
    }


class PartOfRank:
    """A source that returns only a part of the samples on rank 1, without a digest."""

    def __init__(self, **options):
        pass

    def load(self) -> Dataset:
        size = 20 - 4 * int(os.environ["RANK"])
        samples = InMemory(
            torch.zeros(size, 1, 8, 8, dtype=torch.uint8), torch.zeros(size, dtype=torch.int64)
        )
        return Dataset(samples, samples, ["a", "b"])


def refuse_part_of_rank() -> str:
    cfg = config("data=synthetic", "data.dataset._target_=test_sources.PartOfRank")
    with pytest.raises(ConfigError) as error:
        load_dataset(cfg, Runtime("cpu"))
    return str(error.value)


def test_ranks_with_parts_of_a_dataset_are_refused():
    first, second = run_world(2, refuse_part_of_rank, timeout=60)
    assert first == second
    assert first.startswith(
        "the dataset: the train set has 16 samples on rank 1, but 20 on rank 0. "
    )


IMAGES = ["data=hf", "data.image_size=16", "data.num_workers=0", "data.test_split=test"]


def hf_source(root, *overrides: str) -> Any:
    cfg = config(*IMAGES, f"data.root={root}", *overrides)
    return make_source(OmegaConf.to_container(cfg.data, resolve=True), cfg.seed)


def load_hf(root, *overrides: str) -> Dataset:
    """Load a dataset, with a cache of its own, and fail if a connection is tried."""
    source = hf_source(root, *overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", root.parent / "cache")
        patch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection"))
        return source.load()


def write(root, form: str) -> None:
    from hf_datasets import make_hf  # takes 2 s, which all processes of pytest would spend

    if form == "saved":
        make_hf().save_to_disk(root)
    for split, rows in make_hf().items() if form == "parquet" else ():
        rows.to_parquet(root / "data" / f"{split}-00000-of-00001.parquet")


@pytest.mark.parametrize("form", ["saved", "parquet"])
def test_hf_images_have_classes_and_the_transforms_of_data_own(form, tmp_path):
    write(tmp_path / "hf", form)
    dataset = load_hf(tmp_path / "hf", "data.crop_scale=[0.5,1]")
    assert (dataset.train.size, dataset.test.size, dataset.classes) == (
        20,
        8,
        list(own_datasets.Shapes.classes),
    )
    train = dataset.train
    test = dataset.test
    assert [int(train.sample(0, index)[1]) for index in range(5)] == [0, 1, 2, 0, 1]
    assert (train.shape, train.first[0].dtype) == ((3, 16, 16), torch.uint8)
    assert not torch.equal(train.sample(1, 0)[0], train.sample(2, 0)[0]), (
        "a training image is cropped at random"
    )
    assert torch.equal(test.sample(1, 0)[0], test.sample(2, 0)[0])


def test_hf_folder_of_images_has_the_samples_of_data_folder(tmp_path):
    root = write_folder(tmp_path / "images", {"train": 9, "test": 6})
    cfg = config("data=folder", f"data.root={root}", *IMAGES[1:3])
    hub = load_hf(root)
    folder = make_source(OmegaConf.to_container(cfg.data, resolve=True), cfg.seed).load()
    assert hub.classes == folder.classes
    for index in range(6):
        (image, target) = hub.test.sample(1, index)
        (same, label) = folder.test.sample(1, index)
        assert torch.equal(image, same)
        assert target == label


def test_saved_split_and_text_of_hf_are_training_sets_of_which_a_part_is_held_out(tmp_path):
    from datasets import Dataset

    Dataset.from_dict({"text": ["to be", None, "or not"] * 13}).save_to_disk(tmp_path / "one")
    text = load_hf(
        tmp_path / "one",
        "data.dataset.inputs=text",
        "data.dataset.targets=null",
        "data.context=13",
        "data.test_split=null",
    )
    assert bytes(text.train.inputs[0].tolist()) == b"to be\nor not\n"
    assert torch.equal(text.train.inputs[0][1:], text.train.targets[0][:-1])
    assert (text.train.size, text.model_shape()["vocabulary"]) == (12, 256)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.root={}/missing", "data.root={}/missing: is not a directory on this machine"),
        ("data.val_split=dev", "data.root={}/hf: has no split dev; it has train, test"),
        (
            "data.dataset.inputs=img",
            "data.dataset.inputs=img: there is no such column; {}/hf has image, label, number, "
            "text",
        ),
        (
            "data.dataset.targets=y",
            "data.dataset.targets=y: there is no such column; {}/hf has image, label, number, text",
        ),
        (
            "data.dataset.targets=text",
            "data.dataset.targets=text: is text; make it classes with dataset.class_encode_column",
        ),
        (
            "data.dataset.inputs=text",
            "data.dataset.inputs=text: is text; use data.dataset.targets=null task=tokens",
        ),
        ("data.dataset.targets=null", "data.dataset.inputs=image: is not text"),
    ],
)
def test_mistakes_with_hf_are_one_message(override, message, tmp_path):
    write(tmp_path / "hf", "saved")
    with pytest.raises(ConfigError) as error:
        load_hf(tmp_path / "hf", override.format(tmp_path))
    assert str(error.value).startswith(message.format(tmp_path))


def test_missing_package_of_hf_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError, match=r"data=hf: needs the package datasets; pip install 'ddp_lab\[hf\]'"
    ):
        hf_source(tmp_path / "hf").load()
