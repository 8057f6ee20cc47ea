"""The order of writing: a power failure at any time leaves valid checkpoints only."""

import pytest
from checkpoints import bias_in, resume, save_epochs, tiny
from recorded_files import recorded

from ddp_lab.checkpoints.checkpoints import Checkpoints
from ddp_lab.checkpoints.files import best_in, find_damage, remove, steps_in, write_file
from ddp_lab.training.progress import Progress

both_formats = pytest.mark.parametrize("sharded", [False, True], ids=["file", "sharded"])


def save_again(checkpoints: Checkpoints, progress: Progress) -> None:
    """Save other weights at the same step, as a run preempted right after a checkpoint."""
    checkpoints.state.strategy.module.bias.data.fill_(9)
    checkpoints.save(progress)
    checkpoints.wait()


@both_formats
def test_power_failure_before_any_operation_leaves_valid_checkpoints_only(sharded, tmp_path):
    """The best checkpoint changes, the oldest is removed, and the last step is saved twice."""
    checkpoints = tiny(tmp_path / "run", sharded=sharded)
    progress = save_epochs(checkpoints, [3.0, 4.0])
    with recorded(tmp_path / "run", tmp_path / "states") as recorder:
        progress = save_epochs(checkpoints, [2.0, 1.0], progress)
        save_again(checkpoints, progress)
    assert len(recorder.states) > 20
    for operation, state in zip([*recorder.operations, "the end"], recorder.states, strict=True):
        damaged = {path.name: find_damage(path) for path in steps_in(state)}
        assert set(damaged.values()) == {None}, f"before {operation}: {damaged}"
        if best := best_in(state):
            assert find_damage(best) is None, f"before {operation}"
        assert resume(tiny(state, sharded=sharded)).step >= 2, f"before {operation}"
    assert bias_in(steps_in(recorder.states[-1])[-1]) == 9


def test_file_is_synced_and_has_its_hash_before_its_name(tmp_path):
    (tmp_path / "run").mkdir()
    with recorded(tmp_path / "run", tmp_path / "states") as recorder:
        write_file(tmp_path / "run" / "a.pt", {"one": 1})
    assert recorder.operations == [
        ("open", "a.tmp"),
        ("sync", "a.tmp"),
        ("open", "a.sha256.tmp"),
        ("sync", "a.sha256.tmp"),
        ("remove", "a.pt"),
        ("rename", "a.pt.sha256"),
        ("rename", "a.pt"),
        ("remove", "a.tmp"),
        ("remove", "a.sha256.tmp"),
        ("sync", "run"),
    ]


def names_after(operations: list[tuple[str, str]], kind: str) -> list[str]:
    return [name for operation, name in operations if operation == kind]


def test_directory_of_shards_gets_its_name_after_all_its_files_are_synced(tmp_path):
    checkpoints = tiny(tmp_path / "run", None, sharded=True)
    save_epochs(checkpoints, [1.0])  # the folder exists, and modules are loaded
    with recorded(tmp_path / "run", tmp_path / "states") as recorder:
        checkpoints.save(Progress(step=7))
        checkpoints.wait()
    name = "step_00000007.sharded"
    named = recorder.operations.index(("rename", name))
    before = recorder.operations[:named]
    after = recorder.operations[named + 1 :]
    files = {path.name for path in (tmp_path / "run" / name).iterdir()}
    assert files <= set(names_after(before, "sync")), "a file is not on the disk when it counts"
    written = [each for each in names_after(before, "open") if each in files]
    assert written[-2:] == ["state.json", "SHA256SUMS"], "the hashes come last"
    assert before[-1] == ("sync", f"{name}.tmp")
    assert after[0] == ("sync", "run")


@both_formats
def test_removal_takes_the_name_first(sharded, tmp_path):
    save_epochs(tiny(tmp_path / "run", None, sharded), [1.0])
    (path,) = steps_in(tmp_path / "run")
    with recorded(tmp_path / "run", tmp_path / "states") as recorder:
        remove(path)
    first = ("rename", "step_00000001.removed.tmp") if sharded else ("remove", path.name)
    assert recorder.operations[0] == first
    assert all(find_damage(path) is None for state in recorder.states for path in steps_in(state))
    assert not list((tmp_path / "run").iterdir())
