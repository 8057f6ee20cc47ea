"""The record of a directory of images: built once, complete or not there."""

import multiprocessing
import os
import time
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


def test_record_has_the_resized_pixels_of_every_image(tmp_path):
    root = write_folder(tmp_path / "images", {"train": 140})  # enough for worker processes, if there are two CPU cores
    assert_complete(build(root, tmp_path / "cache"), root)
    assert not (tmp_path / "cache" / "building").exists()


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


def test_two_launches_build_one_record_and_remove_what_a_killed_build_left(tmp_path):
    root, cache = write_folder(tmp_path / "images", {"train": 9}), tmp_path / "cache"
    cache.mkdir()
    killed, *builders = [FORK.Process(target=slowly, args=(root, cache)) for _ in range(3)]
    killed.start()
    while count(cache) < 4:
        time.sleep(0.01)
    killed.kill()
    killed.join(60)
    assert not (cache / "key").exists()
    assert (cache / "building").exists()
    assert_complete(build(root, cache, "other"), root)  # also a build of another record removes it
    assert not (cache / "building").exists()
    (cache / "count").unlink()
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(60)
    assert [builder.exitcode for builder in builders] == [0, 0]
    assert count(cache) == 9
    assert_complete(cache / "key", root)
    assert sorted(os.listdir(cache)) == ["count", "key", "lock", "other"]


def test_cache_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    root = write_folder(tmp_path, {"train": 110, "val": 9})
    cfg = config("data=folder", f"data.root={root}", "data.cache=disk", "data.image_size=24", "data.resize=24")
    sizes, save = SimpleNamespace(free=119 * 3 * 24**2), np.save

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda path: sizes)
    monkeypatch.setattr(np, "save", full)
    with pytest.raises(
        NodeError, match=r"data.cache_dir=.*: cannot write .* \(No space left on device\)\. Free some space, or use a"
    ):
        load_dataset(cfg, Runtime("cpu"))
    assert os.listdir(root / ".cache") == ["lock"]
    monkeypatch.setattr(np, "save", save)
    sizes.free -= 1
    with pytest.raises(NodeError, match=r"\(the resized images need at least 0.\d MiB, but .* has 0.\d MiB free\)"):
        load_dataset(cfg, Runtime("cpu"))
    sizes.free += 1
    assert load_dataset(cfg, Runtime("cpu")).train.size == 110


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
