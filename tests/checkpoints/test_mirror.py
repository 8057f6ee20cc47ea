"""checkpoint.mirror: copies of checkpoints at a URL of fsspec.

A launch on an empty disk resumes from them.
"""

import errno
import logging
import shutil
import sys
import threading
from pathlib import Path

import fsspec
import pytest
from checkpoints import assert_same, start
from launches import SMALL, read_metrics

from ddp_lab.checkpoints.files import best_in, find_damage, link_best, remove, steps_in, write_file
from ddp_lab.checkpoints.find import open_checkpoint
from ddp_lab.checkpoints.mirror import Mirror
from ddp_lab.commands import doctor
from ddp_lab.config.errors import ConfigError

ONE, TWO, THREE = (f"step_{step:08}.pt" for step in (1, 2, 3))


def newest(run_dir: Path) -> dict:
    return open_checkpoint(steps_in(run_dir / "checkpoints")[-1]).content()


@pytest.mark.slow
def test_relaunch_on_an_empty_disk_ends_as_an_undisturbed_run(tmp_path):
    line = (
        "strategy=fsdp",
        "data.val_fraction=0.3",
        "checkpoint.format=sharded",
        "checkpoint.best=val_accuracy",
    )
    start(tmp_path / "straight", 2, (*line, "epochs=3"))
    moved = tmp_path / "moved"
    mirror = f"checkpoint.mirror=file://{tmp_path}/mirror"
    start(moved, 2, (*line, mirror, "epochs=2"))
    shutil.rmtree(moved)
    start(moved, 2, (*line, mirror, "epochs=3"))
    assert "resumed from" in (moved / "train.log").read_text()
    assert_same(newest(tmp_path / "straight"), newest(moved), tolerance=0)
    best = [
        best_in(run_dir / "checkpoints").resolve().name
        for run_dir in (tmp_path / "straight", moved)
    ]
    assert best[0] == best[1]
    losses = [
        [row["train_loss"] for row in read_metrics(run_dir)]
        for run_dir in (tmp_path / "straight", moved)
    ]
    assert losses[0] == losses[1], "the metrics of the first two epochs must come back, too"
    kept = {path.name for path in steps_in(moved / "checkpoints")}
    assert {path.name for path in (tmp_path / "mirror" / "moved").iterdir()} == {"best", *kept}, (
        "keep= applies there, too"
    )


def save(folder: Path, name: str) -> Path:
    """Write a checkpoint of one file; a mirror does not look into it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / name, {"name": name})
    return folder / name


@pytest.fixture
def mirror(tmp_path):
    """Return a mirror, in memory, of a run with two checkpoints, of which the first is the best."""
    fsspec.filesystem("memory").store.clear()
    mirror = Mirror("memory://bucket/runs/", tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    link_best(save(mirror.folder, ONE))
    for path in (mirror.folder / ONE, save(mirror.folder, TWO)):
        mirror.upload(path)
    mirror.finish(60)
    return mirror


def restored(mirror: Mirror) -> list[str]:
    """Return the names of the files that the mirror restores in a lost run directory."""
    shutil.rmtree(mirror.run_dir)
    mirror.begin("auto")
    assert all(find_damage(path) is None for path in steps_in(mirror.folder))
    return sorted(
        path.name
        for path in mirror.run_dir.rglob("*")
        if path.is_file() and not path.name.endswith("sha256")
    )


def test_checkpoint_that_is_partial_or_was_changed_is_not_taken(mirror, caplog):
    mirror.fs.pipe_file(
        f"{mirror.remote}/{THREE}/{THREE}",
        b"all of it, but the launch was killed before its hashes",
    )
    assert restored(mirror) == ["best.pt", "metrics.jsonl", ONE, TWO]
    mirror.fs.pipe_file(f"{mirror.remote}/{TWO}/{TWO}", b"another pickle")
    with caplog.at_level(logging.WARNING):
        assert restored(mirror) == ["best.pt", "metrics.jsonl", ONE]
    assert (
        f"{TWO}/{TWO} is missing, or its SHA-256 differs; another checkpoint was used"
        in caplog.text
    )
    mirror.fs.pipe_file(f"{mirror.remote}/{ONE}/SHA256SUMS", b"00  ../../outside\n")
    with pytest.raises(
        ConfigError, match=r"none of the checkpoints is valid: .*Use another name for a new run"
    ):
        restored(mirror)
    assert not steps_in(mirror.folder)


def test_full_disk_at_the_mirror_keeps_the_last_complete_checkpoint_until_there_is_room(
    mirror, monkeypatch, caplog
):
    """Room for two and a half.

    A third one fits when one that is no longer on the disk is removed before its upload.
    """
    put = mirror.fs.put_file
    size = (mirror.folder / ONE).stat().st_size
    room = mirror.fs.du(mirror.remote) + size // 2

    def put_on_full_disk(source: str, target: str) -> None:
        free = room - mirror.fs.du(mirror.remote)
        if free < size:
            mirror.fs.pipe_file(target, bytes(max(free, 0)))
            raise OSError(errno.ENOSPC, "No space left on device")
        put(source, target)

    monkeypatch.setattr(mirror.fs, "put_file", put_on_full_disk)
    mirror.upload(save(mirror.folder, THREE))
    mirror.finish(60)
    assert "could not be uploaded" in caplog.text
    assert mirror._names() == mirror._complete() == [TWO, ONE], (
        "the part of the third one is removed"
    )
    remove(mirror.folder / TWO)
    remove(mirror.folder / THREE)
    four = save(mirror.folder, "step_00000004.pt")
    mirror.upload(four)
    mirror.finish(60)
    assert mirror._complete() == [TWO, ONE], (
        "the best and the newest complete one stay until a newer one is there"
    )
    link_best(four)
    remove(mirror.folder / ONE)
    mirror.fs.pipe_file(f"{mirror.remote}/best", four.name.encode())
    mirror.upload(four)
    mirror.finish(60)
    assert mirror._complete() == [four.name]


def test_name_that_another_run_has_used_there_is_refused(mirror):
    """By a run on a disk of its own, and by a new one.

    Its own run and a launch that resumes it go on.
    """
    mirror.begin("auto")
    (mirror.run_dir / "metrics.jsonl").write_text("{}\n{}\n")
    mirror.begin("never")  # a restart of the launch; a new one is refused by RunDir
    (mirror.run_dir / "metrics.jsonl").write_text('{"epoch": 1}\n')
    with pytest.raises(
        ConfigError,
        match=r"runs/run has checkpoints of another run\. Choose another name, "
        r"remove .*runs/run, or",
    ):
        mirror.begin("auto")
    shutil.rmtree(mirror.run_dir)
    with pytest.raises(
        ConfigError, match=r"resume=never: .*runs/run already contains a run\. Choose another name"
    ):
        mirror.begin("never")
    assert mirror._complete() == [TWO, ONE]


def test_upload_that_hangs_holds_up_nothing(mirror, monkeypatch, caplog):
    released = threading.Event()
    monkeypatch.setattr(mirror.fs, "put_file", lambda *_: released.wait(60))
    mirror.upload(save(mirror.folder, THREE))  # returns at once
    mirror.finish(0.1)
    assert (
        "checkpoint.mirror=memory://bucket/runs/: the last checkpoint was not uploaded within 0 s"
        in caplog.text
    )
    released.set()
    mirror.finish(60)


def test_run_ends_without_a_mirror_that_fails_and_logs_it_once(tmp_path):
    start(tmp_path / "run", 1, ("epochs=3", "checkpoint.mirror=file:///proc/nowhere"))
    log = (tmp_path / "run" / "train.log").read_text()
    assert log.count("could not be uploaded") == 1
    assert len(read_metrics(tmp_path / "run")) == 3


def test_doctor_names_the_place_of_the_mirror_and_refuses_one_that_cannot_be_used(
    command, tmp_path
):
    code, output, errors = command(
        doctor.main, *SMALL, "name=mine", f"checkpoint.mirror=file://{tmp_path}"
    )
    assert (code, f"mirror: checkpoints go to {tmp_path}/mine\n" in output) == (0, True), (
        output + errors
    )
    code, output, errors = command(doctor.main, *SMALL, "checkpoint.mirror=no://x")
    assert (code, (output + errors).count("error: checkpoint.mirror=no://x: cannot be used")) == (
        2,
        1,
    ), output + errors
    assert not list(tmp_path.iterdir())


def test_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        ConfigError,
        match=r"checkpoint.mirror=s3://bucket: cannot be used .*pip install 'ddp_lab\[s3\]'",
    ):
        Mirror("s3://bucket", tmp_path)
