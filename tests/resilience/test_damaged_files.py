"""Files of checkpoints: replaced at once, checked by their hash; damaged, foreign and malicious ones are refused."""

import os
import pickle
import subprocess

import pytest
import torch
from checkpoints import assert_same, train
from launches import SMALL, read_metrics, refusal_in_world
from worlds import run_world

from ddp_lab.resilience.checkpoint_files import write_atomically
from ddp_lab.resilience.run_directory import write_json


def test_kill_between_a_file_and_its_hash_loses_nothing(tmp_path):
    """The kill is between the two renames of write_atomically. A partial file of another save is removed."""
    train(tmp_path, "cut", "epochs=2")
    whole = train(tmp_path, "whole", "epochs=3")
    folder = tmp_path / "cut" / "checkpoints"
    digest = folder / "step_00000010.pt.sha256"
    digest.rename(folder / "step_00000010.sha256.tmp")
    digest.write_text(f"{64 * '0'}  step_00000010.pt\n")  # the hash of an earlier file of that name
    (folder / "step_00000011.tmp").write_bytes(b"partial")
    assert_same(whole, train(tmp_path, "cut", "epochs=3"), tolerance=0)
    log = (tmp_path / "cut" / "train.log").read_text()
    assert "resumed from" in log
    assert "damaged" not in log
    assert not list(folder.glob("*.tmp"))


def damage(kind: str, path) -> None:
    content = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(content[:-100])
    elif kind == "flipped":
        path.write_bytes(content[:3000] + bytes([content[3000] ^ 1]) + content[3001:])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "foreign":
        torch.save({"weights": torch.zeros(3)}, path)
    elif kind == "half-deleted":
        path.with_name(path.name + ".sha256").unlink()
    elif kind == "lost":
        path.unlink()


@pytest.mark.parametrize("kind", ["truncated", "flipped", "empty", "foreign", "half-deleted", "lost"])
def test_damaged_file_is_named_and_the_previous_one_resumed(kind, tmp_path):
    whole = train(tmp_path, "run", "epochs=3")
    newest, before = (tmp_path / "run" / "checkpoints" / f"step_000000{step}.pt" for step in (15, 10))
    damage(kind, newest)
    assert_same(whole, train(tmp_path, "run", "epochs=3"), tolerance=0)
    log = (tmp_path / "run" / "train.log").read_text()
    assert f"WARNING {newest} is damaged (" in log
    assert f"resuming from {before}, the newest valid checkpoint" in log
    assert [record["epoch"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3]
    for path in (newest, before):
        damage(kind, path)
    line = f"{' '.join(SMALL)} runs_dir={tmp_path} name=run epochs=4"
    ((code, printed),) = run_world(1, refusal_in_world, line)
    assert code == 2
    assert "none of the run's checkpoints is valid" in printed
    assert all(str(path) in printed for path in (newest, before))


def test_flipped_byte_in_a_named_file_is_refused(tmp_path):
    train(tmp_path, "good", "epochs=1")
    path = tmp_path / "good" / "checkpoints" / "step_00000005.pt"
    damage("flipped", path)
    ((code, printed),) = run_world(1, refusal_in_world, f"{' '.join(SMALL)} runs_dir={tmp_path}/new resume={path}")
    assert code == 2
    assert f"resume={path}: the file is damaged: its SHA-256" in printed
    assert not (tmp_path / "new").exists(), "the damage must be found before a run directory is made"


def test_hash_file_passes_sha256sum(tmp_path):
    train(tmp_path, "good", "epochs=1")
    folder = tmp_path / "good" / "checkpoints"
    checked = subprocess.run(["sha256sum", "-c", "step_00000005.pt.sha256"], cwd=folder, capture_output=True, text=True)
    assert checked.stdout == "step_00000005.pt: OK\n"


class Malicious:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (self.trace,)


def bad_file(kind: str, folder, good: dict) -> None:
    path = folder / "bad.pt"
    if kind == "pickle":
        path.write_bytes(pickle.dumps({"progress": Malicious(str(folder / "executed"))}))
    elif kind == "archive":
        torch.save({"progress": Malicious(str(folder / "executed"))}, path)
    elif kind == "truncated":
        torch.save(good, path)
        path.write_bytes(path.read_bytes()[:1000])
    elif kind == "text":
        path.write_text("junk")
    elif kind == "empty":
        path.touch()
    elif kind == "foreign":
        torch.save(good["model"], path)
    elif kind == "renamed":
        torch.save(good | {"model": {f"module.{name}": tensor for name, tensor in good["model"].items()}}, path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("pickle", "cannot be read as a checkpoint"),
        ("archive", "cannot be read as a checkpoint"),
        ("truncated", "cannot be read as a checkpoint"),
        ("text", "cannot be read as a checkpoint"),
        ("empty", "cannot be read as a checkpoint"),
        ("foreign", "is not a checkpoint of ddp_lab: it lacks model, optimizer, progress, scheduler, seed"),
        ("renamed", "does not match the model: conv.0.weight is missing in the checkpoint, (16, 3, 3, 3) in the model"),
    ],
)
def test_bad_files_are_refused(kind, message, tmp_path):
    bad_file(kind, tmp_path, train(tmp_path, "good", "epochs=1"))
    line = f"{' '.join(SMALL)} runs_dir={tmp_path}/new resume={tmp_path}/bad.pt"
    ((code, printed),) = run_world(1, refusal_in_world, line)
    assert code == 2
    assert message in printed
    assert printed.count("error: ") == 1
    assert not (tmp_path / "executed").exists(), "the file ran code"
    assert not (tmp_path / "new").exists()


WRITERS = {
    "checkpoint": lambda path, step: write_atomically(path, {"step": step}, path.with_suffix(".tmp")),
    "json": lambda path, step: write_json(path, {"step": step}),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_files_are_replaced_and_never_written_in_place(write, tmp_path):
    """A process that has the old file open still reads all of it. So a kill at any time leaves the old or the new file."""
    path = tmp_path / "file.pt"
    write(path, 1)
    before = path.read_bytes()
    with path.open("rb") as reader:
        write(path, 2)
        assert reader.read() == before
    assert path.read_bytes() != before
