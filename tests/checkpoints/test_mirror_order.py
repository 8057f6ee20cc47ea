"""checkpoint.mirror: the order of uploads and downloads, and a run's wait for its last upload."""

import contextlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from checkpoints import save_epochs, tiny
from launches import SMALL, main_in_world
from recorded_files import recorded
from worlds import run_world

from ddp_lab.checkpoints.files import best_in, find_damage, steps_in
from ddp_lab.checkpoints.mirror import Mirror

CHANGES = ("put_file", "pipe_file", "rm")
both_formats = pytest.mark.parametrize("sharded", [False, True], ids=["file", "sharded"])


class RecordingFileSystem:
    """A file system of fsspec whose changes are recorded, each before it happens.

    Args:
        real: the file system.
        before: called before each change.

    Attributes:
        changes: names of the methods, with the last two parts of the path that each changes.
    """

    def __init__(self, real: fsspec.AbstractFileSystem, before: Callable[[], None]):
        self.real = real
        self.before = before
        self.changes: list[tuple[str, str]] = []

    def __getattr__(self, name: str):
        method = getattr(self.real, name)
        if name not in CHANGES:
            return method

        def change(*args, **options):
            path = args[1] if name == "put_file" else args[0]
            self.before()
            self.changes.append((name, "/".join(path.split("/")[-2:])))
            return method(*args, **options)

        return change


def mirror_of(tmp_path: Path) -> Mirror:
    """Return a mirror in memory, which is empty, of the run directory tmp_path/run."""
    fsspec.filesystem("memory").store.clear()
    mirror = Mirror("memory://bucket", tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    return mirror


def upload_epochs(mirror: Mirror, losses: list[float], sharded: bool) -> None:
    """Save a checkpoint after each epoch, of which the mirror uploads each before the next."""
    checkpoints = tiny(mirror.folder, sharded=sharded)

    def upload(path: Path) -> None:
        mirror.upload(path)
        mirror.finish(60)

    save_epochs(checkpoints, losses, after_write=upload)


@both_formats
def test_hashes_are_uploaded_after_all_files_and_removed_before_them(sharded, tmp_path):
    mirror = mirror_of(tmp_path)
    recording = RecordingFileSystem(mirror.fs, lambda: None)
    mirror.fs = recording
    upload_epochs(mirror, [4.0, 3.0, 2.0], sharded)
    end = ".sharded" if sharded else ".pt"
    one = f"step_00000001{end}"
    three = f"step_00000003{end}"
    uploaded = [
        (operation, path) for operation, path in recording.changes if path.startswith(three)
    ]
    (path,) = [path for path in steps_in(mirror.folder) if path.name == three]
    files = sorted(each.name for each in path.iterdir()) if sharded else [three]
    puts = [("put_file", f"{three}/{file}") for file in files if file != "SHA256SUMS"]
    pipes = [("pipe_file", f"{three}/{file}") for file in ("metrics.jsonl", "SHA256SUMS")]
    assert uploaded == [*puts, *pipes], "each file once, and the hashes last"
    best = recording.changes.index(("pipe_file", "run/best"), recording.changes.index(pipes[-1]))
    assert best == recording.changes.index(pipes[-1]) + 1, (
        "the best one is named when it is complete"
    )
    removals = [("rm", f"{one}/SHA256SUMS"), ("rm", f"run/{one}")]
    first = recording.changes.index(removals[0])
    assert recording.changes[first : first + 2] == removals


def restored(store: dict, tmp_path: Path) -> list[str]:
    """Return the names of the checkpoints that a launch on an empty disk gets from the memory."""
    memory = fsspec.filesystem("memory")
    kept = memory.store.copy()
    memory.store.clear()
    memory.store.update(store)
    run_dir = tmp_path / "other" / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    Mirror("memory://bucket", run_dir).begin("auto")
    memory.store.clear()
    memory.store.update(kept)
    paths = steps_in(run_dir / "checkpoints")
    assert all(find_damage(path) is None for path in paths)
    best = best_in(run_dir / "checkpoints")
    assert best is None or find_damage(best) is None
    return [path.stem for path in paths]


@both_formats
def test_kill_during_any_upload_leaves_a_checkpoint_to_resume_from(sharded, tmp_path):
    mirror = mirror_of(tmp_path)
    states: list[dict] = []
    memory = mirror.fs
    mirror.fs = RecordingFileSystem(memory, lambda: states.append(memory.store.copy()))
    upload_epochs(mirror, [1.0, 4.0, 3.0, 2.0], sharded)
    steps = [restored(state, tmp_path)[-1:] for state in states]
    newest = [int(step[0].removeprefix("step_")) if step else 0 for step in steps]
    assert newest == sorted(newest), "none is removed before a newer one is complete"
    assert set(newest) == {0, 1, 2, 3, 4}
    assert newest[0] == 0


@both_formats
def test_kill_during_a_download_leaves_valid_checkpoints_only(sharded, tmp_path):
    mirror = mirror_of(tmp_path)
    upload_epochs(mirror, [1.0, 4.0, 3.0], sharded)
    shutil.rmtree(mirror.run_dir)
    mirror.run_dir.mkdir()
    with recorded(mirror.run_dir, tmp_path / "states") as recorder:
        mirror.begin("auto")
    assert len(steps_in(recorder.states[-1] / "checkpoints")) == 2, "the newest and the best"
    for operation, state in zip([*recorder.operations, "the end"], recorder.states, strict=True):
        names = [path.name for path in steps_in(state / "checkpoints")]
        damages = [find_damage(state / "checkpoints" / name) for name in names]
        assert damages == [None] * len(names), f"before {operation}"


def train_with_slow_mirror(folder: Path, override: str) -> None:
    """Train with a mirror at which each checkpoint takes a second."""
    copy = Mirror._copy

    def slow_copy(mirror: Mirror, path: Path) -> None:
        threading.Event().wait(1)
        copy(mirror, path)

    Mirror._copy = slow_copy
    line = [f"runs_dir={folder}/runs", "name=run", f"checkpoint.mirror=file://{folder}/mirror"]
    with contextlib.suppress(SystemExit):
        main_in_world(*SMALL, "epochs=2", *line, override)


ENDS = {
    "finished": ("seed=0", 10),
    "preempted": ("inject=sigterm@rank=0,step=7", 7),
    "failed": ("inject=nan@rank=0,step=7", 5),
}


@pytest.mark.parametrize("end", ENDS)
def test_run_waits_for_its_last_upload(end, tmp_path):
    override, step = ENDS[end]
    dies = pytest.raises(AssertionError, match="rank 0: died")
    with dies if end == "failed" else contextlib.nullcontext():
        run_world(1, train_with_slow_mirror, tmp_path, override)
    newest = steps_in(tmp_path / "runs" / "run" / "checkpoints")[-1].name
    assert int(newest.removeprefix("step_").removesuffix(".pt")) >= step
    uploaded = {path.name for path in (tmp_path / "mirror" / "run" / newest).iterdir()}
    assert uploaded >= {newest, "SHA256SUMS", "metrics.jsonl"}
