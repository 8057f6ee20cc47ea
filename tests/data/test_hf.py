"""data=hf: datasets of the package `datasets`, in the forms in which they are on disk. Nothing is downloaded."""

import sys

import datasets
import pytest
import torch
from configs import config
from hf_datasets import make_hf
from image_folders import write_folder
from omegaconf import OmegaConf
from own_datasets import Shapes

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.dataset import Dataset
from ddp_lab.data.sources import make_source

IMAGES = ["data=hf", "data.image_size=16", "data.num_workers=0", "data.test_split=test"]


def load(root, *overrides: str) -> Dataset:
    """Load a dataset, with a cache of its own, and fail if a connection is tried."""
    cfg = config(*IMAGES, f"data.root={root}", *overrides)
    source = make_source(OmegaConf.to_container(cfg.data, resolve=True), cfg.seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", root.parent / "cache")
        patch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection"))
        return source.load()


def write(root, form: str) -> None:
    if form == "saved":
        make_hf().save_to_disk(root)
    for split, rows in make_hf().items() if form == "parquet" else ():
        rows.to_parquet(root / "data" / f"{split}-00000-of-00001.parquet")


@pytest.mark.parametrize("form", ["saved", "parquet"])
def test_images_have_classes_and_the_transforms_of_data_own(form, tmp_path):
    write(tmp_path / "hf", form)
    dataset = load(tmp_path / "hf", "data.crop_scale=[0.5,1]")
    assert (dataset.train.size, dataset.test.size, dataset.classes) == (20, 8, list(Shapes.classes))
    train, test = dataset.train, dataset.test
    assert [int(train.sample(0, index)[1]) for index in range(5)] == [0, 1, 2, 0, 1]
    assert (train.shape, train.first[0].dtype) == ((3, 16, 16), torch.uint8)
    assert not torch.equal(train.sample(1, 0)[0], train.sample(2, 0)[0]), "a training image is cropped at random"
    assert torch.equal(test.sample(1, 0)[0], test.sample(2, 0)[0])


def test_folder_of_images_has_the_samples_of_data_folder(tmp_path):
    root = write_folder(tmp_path / "images", {"train": 9, "test": 6})
    cfg = config("data=folder", f"data.root={root}", *IMAGES[1:3])
    hub, folder = load(root), make_source(OmegaConf.to_container(cfg.data, resolve=True), cfg.seed).load()
    assert hub.classes == folder.classes
    for index in range(6):
        (image, target), (same, label) = hub.test.sample(1, index), folder.test.sample(1, index)
        assert torch.equal(image, same)
        assert target == label


def test_saved_split_and_text_are_training_sets_of_which_a_part_is_held_out(tmp_path):
    datasets.Dataset.from_dict({"text": ["to be", None, "or not"] * 13}).save_to_disk(tmp_path / "one")
    text = load(
        tmp_path / "one", "data.dataset.inputs=text", "data.dataset.targets=null", "data.context=13", "data.test_split=null"
    )
    assert bytes(text.train.inputs[0].tolist()) == b"to be\nor not\n"
    assert torch.equal(text.train.inputs[0][1:], text.train.targets[0][:-1])
    assert (text.train.size, text.model_shape()["vocabulary"]) == (12, 256)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.root={}/missing", "data.root={}/missing: is not a directory on this machine"),
        ("data.val_split=dev", "data.root={}/hf: has no split dev; it has train, test"),
        ("data.dataset.inputs=img", "data.dataset.inputs=img: there is no such column; {}/hf has image, label, number, text"),
        ("data.dataset.targets=y", "data.dataset.targets=y: there is no such column; {}/hf has image, label, number, text"),
        ("data.dataset.targets=text", "data.dataset.targets=text: is text; make it classes with dataset.class_encode_column"),
        ("data.dataset.inputs=text", "data.dataset.inputs=text: is text; use data.dataset.targets=null task=tokens"),
        ("data.dataset.targets=null", "data.dataset.inputs=image: is not text"),
    ],
)
def test_mistakes_are_one_message(override, message, tmp_path):
    write(tmp_path / "hf", "saved")
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "hf", override.format(tmp_path))
    assert str(error.value).startswith(message.format(tmp_path))


def test_missing_package_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"data=hf: needs the package datasets; pip install 'ddp_lab\[hf\]'"):
        load(tmp_path / "hf")
