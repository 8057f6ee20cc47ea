"""The record of a directory of images: built once, complete or not there."""

import multiprocessing
import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from configs import config
from image_folders import write_folder

from ddp_lab.config.errors import NodeError
from ddp_lab.data import cache as cache_module
from ddp_lab.data.cache import Pictures, build_record
from ddp_lab.data.folder import find_images
from ddp_lab.data.images import ImageOptions, decode, resize
from ddp_lab.run.job import load_dataset
from ddp_lab.world.runtime import Runtime

FORK = multiprocessing.get_context("fork")


OPTIONS = ImageOptions(0, 3, 24, 24, None, None, 0.0, [0.5])


def build(root: Path, cache: Path, key: str = "key") -> Path:
    names = np.array([os.fsencode(name) for name in find_images(root)])
    return build_record(cache / key, Pictures(root, names, OPTIONS), keep=True)


def assert_complete(folder: Path, root: Path) -> None:
    names = np.load(folder / "names.npy")
    cached = Pictures(root, names, OPTIONS, folder)
    assert [os.fsdecode(name) for name in names] == find_images(root)
    for number, name in enumerate(find_images(root)):
        assert torch.equal(cached[number], resize(decode(root / name, 3), 24))


@pytest.mark.parametrize("size", [20, 140])  # without and with worker processes, if there are two CPU cores
def test_record_has_the_resized_pixels_of_every_image(tmp_path, size):
    root = write_folder(tmp_path / "images", {"train": size})
    assert_complete(build(root, tmp_path / "cache"), root)
    assert not (tmp_path / "cache" / "building").exists()


def test_record_that_exists_is_not_built_again(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "images", {"train": 3})
    build(root, tmp_path / "cache")
    monkeypatch.setattr(cache_module, "decode", None)
    build(root, tmp_path / "cache")


def slowly(root: Path, cache: Path) -> None:
    """Build a record slowly, and count the images in a file."""

    def decode_slowly(path, channels):
        time.sleep(0.03)
        with (cache / "count").open("a") as file:
            file.write(".")
        return decode(path, channels)

    cache_module.decode = decode_slowly  # in this process only
    build(root, cache)


def count(cache: Path) -> int:
    path = cache / "count"
    return len(path.read_text()) if path.exists() else 0


def test_two_launches_build_one_record(tmp_path):
    root, cache = write_folder(tmp_path / "images", {"train": 9}), tmp_path / "cache"
    builders = [FORK.Process(target=slowly, args=(root, cache)) for _ in range(2)]
    cache.mkdir()
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(60)
    assert [builder.exitcode for builder in builders] == [0, 0]
    assert count(cache) == 9
    assert_complete(cache / "key", root)


def test_killed_build_is_replaced_by_the_next(tmp_path):
    root, cache = write_folder(tmp_path / "images", {"train": 9}), tmp_path / "cache"
    cache.mkdir()
    builder = FORK.Process(target=slowly, args=(root, cache))
    builder.start()
    while count(cache) < 4:
        time.sleep(0.01)
    builder.kill()
    builder.join(60)
    assert not (cache / "key").exists()
    assert (cache / "building").exists()
    assert_complete(build(root, cache, "other"), root)  # also if it builds another record
    assert sorted(os.listdir(cache)) == ["count", "lock", "other"]


def test_build_that_fails_leaves_nothing(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "images", {"train": 3})

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space left"):
        build(root, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == ["lock"]


def test_cache_that_does_not_fit_is_refused_before_it_is_built(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "images", {"train": 110, "val": 9})
    overrides = ["data=folder", f"data.root={root}", "data.cache=disk", "data.image_size=24", "data.resize=24"]
    make = partial(load_dataset, config(*overrides), Runtime("cpu"))
    needed = 119 * 3 * 24**2
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(
        NodeError, match=r"data.cache_dir=.* \(the resized images need at least 0.\d MiB, but .* has 0.\d MiB free"
    ):
        make()
    assert os.listdir(root / ".cache") == ["lock"]
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    assert make().train.size == 110


def test_records_that_killed_launches_left_in_memory_are_removed(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "images", {"train": 3, "val": 3})
    monkeypatch.setattr(cache_module, "SHARED_MEMORY", tmp_path)
    ended = FORK.Process()
    ended.start()
    ended.join(60)
    left, alive, others = (f"ddp_lab-{process}-abc" for process in (ended.pid, os.getppid(), "other"))
    for name in (left, alive, others):
        (tmp_path / name).mkdir()
    load_dataset(config("data=folder", f"data.root={root}", "data.cache=ram"), Runtime("cpu"))
    assert sorted(path.name for path in tmp_path.glob("ddp_lab-*")) == sorted([alive, others])
