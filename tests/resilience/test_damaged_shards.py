"""Sharded checkpoints that are damaged or crafted are refused unread, and interrupted ones are completed or removed."""

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sharded import names, resume, save_epochs, tiny
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from ddp_lab.config.errors import ConfigError
from ddp_lab.resilience.checkpoint_folder import steps_in
from ddp_lab.resilience.sharded_files import (
    MANIFEST,
    METADATA,
    STATE,
    damage_of_shards,
    read_manifest,
    record_file,
    write_manifest,
)
from ddp_lab.resilience.sharded_read import read_metadata
from ddp_lab.world.runtime import Runtime


def damage(kind: str, folder: Path) -> None:
    share = folder / "__0_0.distcp"
    if kind == "missing":
        share.unlink()
    elif kind == "truncated":
        share.write_bytes(share.read_bytes()[:-1])
    elif kind == "lost":
        (folder / MANIFEST).unlink()
    else:
        path = share if kind == "flipped" else folder / kind
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped", "lost", METADATA, STATE, MANIFEST])
def test_damaged_shards_are_named_and_the_previous_checkpoint_resumed(kind, tmp_path, caplog):
    save_epochs(tiny(tmp_path, best=None), [1.0, 1.0])
    before, newest = steps_in(tmp_path)
    damage(kind, newest)
    checkpoints = tiny(tmp_path)
    with pytest.raises(ConfigError, match=f"resume={newest}: the checkpoint is damaged: "):
        resume(checkpoints, str(newest))
    assert resume(checkpoints).step == 1
    assert checkpoints.strategy.module.bias.item() == 1
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"{newest} is damaged (")
    assert warning.endswith(f"); resuming from {before}, the newest valid checkpoint")
    damage(kind, before)
    with pytest.raises(ConfigError, match="none of the run's checkpoints is valid"):
        resume(tiny(tmp_path))


class Malicious:
    def __init__(self, trace: Path):
        self.trace = str(trace)

    def __reduce__(self):
        return os.mkdir, (self.trace,)


def craft(kind: str, folder: Path, trace: Path) -> None:
    """Let a file of a checkpoint execute code when it is loaded with torch's own functions."""
    metadata = read_metadata(folder)
    share = folder / "__0_0.distcp"
    if kind == "pickle":
        metadata = Malicious(trace)
    elif kind == "object":  # torch loads what is not a tensor without restrictions
        metadata.state_dict_metadata["model.bias"] = BytesStorageMetadata()
        index = MetadataIndex("model.bias")
        content = pickle.dumps(Malicious(trace))
        metadata.storage_data[index] = replace(next(iter(metadata.storage_data.values())), offset=0, length=len(content))
        share.write_bytes(content)
    elif kind == "tensor":
        share.write_bytes(pickle.dumps(Malicious(trace)))
    elif kind == "path":
        for part in metadata.storage_data.values():
            part.relative_path = "../outside"
        shutil.copy(share, folder.parent / "outside")
    elif kind == "gap":
        metadata.state_dict_metadata["model.bias"].chunks.clear()
    elif kind == "state":
        torch.save({"progress": Malicious(trace)}, folder / STATE)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("rehashed", [False, True])
@pytest.mark.parametrize("kind", ["pickle", "object", "tensor", "path", "gap", "state"])
def test_crafted_checkpoint_does_not_run_code(kind, rehashed, tmp_path):
    """The hashes reveal the change. Restricted loading protects from somebody who writes another manifest, too."""
    save_epochs(tiny(tmp_path, best=None), [1.0])
    folder, trace = tmp_path / "step_00000001.sharded", tmp_path / "executed"
    craft(kind, folder, trace)
    if rehashed:
        write_manifest(folder, {name: record_file(folder / name) for name in read_manifest(folder)})
    with pytest.raises((ConfigError, pickle.UnpicklingError, RuntimeError)) as caught:
        resume(tiny(tmp_path))
    assert not trace.exists(), "the checkpoint ran code"
    assert ("none of the run's checkpoints is valid" in str(caught.value)) != rehashed


def test_state_without_some_of_its_keys_is_refused_and_they_are_named(tmp_path):
    save_epochs(tiny(tmp_path, best=None), [1.0])
    folder = tmp_path / "step_00000001.sharded"
    state = torch.load(folder / STATE, weights_only=True)
    del state["scheduler"], state["names"]
    torch.save(state, folder / STATE)
    write_manifest(folder, {name: record_file(folder / name) for name in read_manifest(folder)})
    with pytest.raises(ConfigError) as error:
        resume(tiny(tmp_path), str(folder))
    reason = f"cannot be read as a sharded checkpoint ({STATE} lacks names, scheduler). Use another one"
    assert str(error.value) == f"resume={folder}: {reason}"


def test_manifest_has_no_names_outside_its_directory(tmp_path):
    save_epochs(tiny(tmp_path, best=None), [1.0])
    folder = tmp_path / "step_00000001.sharded"
    write_manifest(folder, read_manifest(folder) | {"../secret": record_file(folder / STATE)})
    assert damage_of_shards(folder, Runtime("cpu")) == "manifest.json is missing or damaged"


@pytest.mark.parametrize(
    ("left", "resumed"),
    [
        ("tmp", 2),  # complete, but killed before it was renamed
        ("replaced.tmp", 2),  # killed between two renames
        ("removed.tmp", 1),
        ("partial", 1),
    ],
)
def test_interrupted_save_is_completed_or_removed(left, resumed, tmp_path, caplog):
    save_epochs(tiny(tmp_path, best=None), [1.0, 1.0])
    newest = tmp_path / "step_00000002.sharded"
    if left == "partial":
        (newest / MANIFEST).unlink()
    newest.rename(tmp_path / f"step_00000002.sharded.{'tmp' if left == 'partial' else left}")
    assert resume(tiny(tmp_path, best=None)).step == resumed
    assert not caplog.records, "what is not complete is not a damaged checkpoint"
    assert names(tmp_path) == [f"step_0000000{step}.sharded" for step in range(1, resumed + 1)]
