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
from ddp_lab.data import folder, record, space
from ddp_lab.data.decode import decode, resize
from ddp_lab.data.record import Cached, build_record, locked
from ddp_lab.data.space import estimate_bytes, remove_abandoned
from ddp_lab.data.tree import Names, find_images
from ddp_lab.run.job import load_dataset
from ddp_lab.world.runtime import Runtime

FORK = multiprocessing.get_context("fork")


def build(root: Path, cache: Path, keep: bool = True) -> Path:
    build_record(cache / "key", cache / "building-key", root, find_images(root), 3, 24, keep)
    return cache / "key"


def assert_complete(folder: Path, root: Path) -> None:
    names = Names((folder / "names").read_bytes())
    cached = Cached(folder, torch.arange(len(names)), 3)
    for number in range(len(names)):
        image, target = cached[number]
        assert torch.equal(image, resize(decode(root / names[number], 3), 24))
        assert target == number


@pytest.mark.parametrize("size", [20, 140])  # without and with worker processes, if there are two CPU cores
def test_record_has_the_resized_pixels_of_every_image(tmp_path, size):
    root = write_folder(tmp_path / "images", {"train": size})
    assert_complete(build(root, tmp_path / "cache"), root)
    assert not (tmp_path / "cache" / "building-key").exists()


def test_record_that_exists_is_not_built_again(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "images", {"train": 3})
    build(root, tmp_path / "cache")
    monkeypatch.setattr(record, "decode", None)
    build(root, tmp_path / "cache")


def slowly(root: Path, cache: Path) -> None:
    """Build a record slowly, and count the images in a file."""

    def decode_slowly(path, channels):
        time.sleep(0.03)
        with (cache / "count").open("a") as file:
            file.write(".")
        return decode(path, channels)

    record.decode = decode_slowly  # in this process only
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
    assert (cache / "building-key").exists()
    assert_complete(build(root, cache), root)
    assert sorted(os.listdir(cache)) == ["count", "key"]


def test_build_that_fails_leaves_nothing(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "images", {"train": 3})

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space left"):
        build(root, tmp_path / "cache")
    assert not os.listdir(tmp_path / "cache")


def test_what_killed_builds_of_other_records_left_is_removed_but_not_what_is_being_built(tmp_path):
    cache = tmp_path / "cache"
    for key in ("killed", "running"):
        (cache / f"building-{key}").mkdir(parents=True)
        (cache / f"building-{key}.lock").touch()
    with locked(cache / "building-running.lock"):
        remove_abandoned(cache)
        assert sorted(os.listdir(cache)) == ["building-running", "building-running.lock"]


def test_cache_that_does_not_fit_is_refused_before_it_is_built(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "images", {"train": 110, "val": 9})
    overrides = ["data=folder", f"data.root={root}", "data.cache=disk", "data.image_size=24", "data.resize=24"]
    make = partial(load_dataset, config(*overrides), Runtime("cpu"))
    needed = estimate_bytes(root, find_images(root), 3, 24)
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(NodeError, match=r"data.cache_dir=.*: the resized images need about 0.\d MiB, but .* has 0.\d MiB free"):
        make()
    assert not list((root / ".cache").glob("*"))
    monkeypatch.undo()
    dataset = make()
    written = sum(path.stat().st_size for path in (root / ".cache").glob("*/pixels-*.bin"))
    assert dataset.train.size == 110
    assert 0.9 * written < needed < 1.1 * written


def test_records_that_killed_launches_left_in_memory_are_removed(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "images", {"train": 3, "val": 3})
    monkeypatch.setattr(folder, "SHARED_MEMORY", tmp_path / "memory")
    memory = tmp_path / "memory" / f"ddp_lab-{os.getuid()}"
    ended = FORK.Process()
    ended.start()
    ended.join(60)
    alive = f"{'b' * 16}-{os.getppid()}"
    for name in (f"{'a' * 16}-{ended.pid}", alive):
        (memory / name).mkdir(parents=True)
    load_dataset(config("data=folder", f"data.root={root}", "data.cache=ram"), Runtime("cpu"))
    assert os.listdir(memory) == [alive]
