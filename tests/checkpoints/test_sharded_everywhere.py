"""Wherever a checkpoint is looked for, both formats of the same run are found."""

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import start
from launches import SMALL, main_in_world, read_metrics, refusal_in_world
from worlds import run_world

from ddp_lab.checkpoints.files import best_in, steps_in
from ddp_lab.checkpoints.find import find_source, result_in
from ddp_lab.checkpoints.mirror import Mirror
from ddp_lab.commands import evaluate, export, merge, predict, runs
from ddp_lab.run.runs import find_runs

ENDS = {"full": ".pt", "sharded": ".sharded"}
LINE = ("data.val_fraction=0.3", "checkpoint.best=val_accuracy", "epochs=3", "optimizer.lr=0.05")
NEWEST = 9  # steps of three epochs
every_format = pytest.mark.parametrize("form", ENDS)


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    """Return the run directories of the same run with both formats."""
    folder = tmp_path_factory.mktemp("runs")
    for form in ENDS:
        start(folder / form, 1, (*LINE, f"checkpoint.format={form}"))
    return {form: folder / form for form in ENDS}


@pytest.fixture
def run_dir(originals, form, tmp_path) -> Path:
    """Return a copy of the run with one of the formats."""
    return shutil.copytree(originals[form], tmp_path / "runs" / "mine", symlinks=True)


def newest_of(run_dir: Path, form: str) -> Path:
    return run_dir / "checkpoints" / f"step_{NEWEST:08d}{ENDS[form]}"


def test_both_formats_are_of_the_same_run(originals):
    losses = [
        [row["train_loss"] for row in read_metrics(run_dir)] for run_dir in originals.values()
    ]
    assert losses[0] == losses[1]
    for form, run_dir in originals.items():
        assert steps_in(run_dir / "checkpoints")[-1] == newest_of(run_dir, form)


@every_format
def test_launch_resumes_by_name_by_path_and_after_a_restart(run_dir, form):
    newest = newest_of(run_dir, form)
    folder = run_dir / "checkpoints"
    assert find_source(run_dir.parent, "mine", "auto", None) == folder
    assert find_source(run_dir.parent, "mine", "never", "mine") == folder, "of an elastic restart"
    assert find_source(run_dir.parent, None, "auto", "mine") == folder
    assert find_source(run_dir.parent, "mine", "never", None) is None
    start(run_dir, 1, (*LINE, "epochs=4"))
    assert f"resumed from {newest}: epoch 4" in (run_dir / "train.log").read_text()
    other = run_dir.parent / "other"
    start(other, 1, (*LINE, "epochs=4", f"resume={newest}"))
    assert f"resumed from {newest}: epoch 4" in (other / "train.log").read_text()


@every_format
def test_result_of_the_log_and_of_a_launch_with_nothing_to_do_is_the_best_checkpoint(run_dir, form):
    best = best_in(run_dir / "checkpoints")
    assert best.name == f"best{ENDS[form]}"
    path, progress = result_in(run_dir / "checkpoints", "val_accuracy")
    accuracies = [row["val_accuracy"] for row in read_metrics(run_dir)]
    assert (path, progress.epoch - 1) == (best, accuracies.index(max(accuracies)) + 1)
    run_world(1, main_in_world, *SMALL, *LINE, f"runs_dir={run_dir.parent}", "name=mine")
    last = (run_dir / "train.log").read_text().splitlines()[-1]
    assert f"result: epoch {progress.epoch - 1} (best val_accuracy)" in last
    assert last.endswith(f"({best})")


@every_format
@pytest.mark.parametrize("choice", ["auto", "best", "last", "path"])
def test_commands_evaluate_the_chosen_checkpoint(choice, run_dir, form, command, tmp_path):
    newest = newest_of(run_dir, form)
    best = best_in(run_dir / "checkpoints")
    chosen = {"auto": best, "best": best, "last": newest, "path": newest}[choice]
    checkpoint = str(newest) if choice == "path" else choice
    output = tmp_path / "found.json"
    code, _, errors = command(
        evaluate.main, run_dir, "split=val", "--checkpoint", checkpoint, "--json", output
    )
    assert code == 0, errors
    results = json.loads(output.read_text())
    row = next(row for row in read_metrics(run_dir) if row["epoch"] == results["epoch"])
    assert results["checkpoint"] == str(chosen)
    assert results["val_accuracy"] == row["val_accuracy"]
    exported = tmp_path / "model.safetensors"
    code, printed, errors = command(
        export.main, run_dir, "--checkpoint", checkpoint, "--output", exported
    )
    assert code == 0, errors
    assert f": {chosen}; " in printed


@every_format
def test_missing_best_checkpoint_is_reported_with_both_names(run_dir, form, command, tmp_path):
    best_in(run_dir / "checkpoints").unlink()
    line = [run_dir, "--checkpoint", "best", "--output", tmp_path / "a.safetensors"]
    code, _, errors = command(export.main, *line)
    expected = f"--checkpoint best: {run_dir}/checkpoints contains no best.pt and no best.sharded"
    assert (code, errors) == (2, f"error: {expected}\n")


@every_format
def test_checkpoint_in_place_of_a_run_is_named_with_the_right_command(run_dir, form, command):
    newest = newest_of(run_dir, form)
    code, _, errors = command(predict.main, newest, "cat.jpg")
    assert code == 2
    assert f"{newest}: is a checkpoint, and the directory of a run is needed" in errors
    assert f"Use {run_dir} --checkpoint {newest}" in errors


@every_format
def test_table_of_runs_has_the_epoch_of_the_best_checkpoint(run_dir, form):
    (run,) = find_runs(run_dir.parent)
    best = max(row["val_accuracy"] for row in read_metrics(run_dir))
    assert run.best() == ("val_accuracy", best)


@every_format
def test_clean_keeps_a_run_with_a_checkpoint_and_deletes_it_without(run_dir, form, command):
    """A run that was preempted in its first epoch has a checkpoint and no row of an epoch."""
    (run_dir / "metrics.jsonl").unlink()
    for path in (run_dir / "checkpoints").glob("best*"):
        path.unlink()
    line = ["--runs-dir", run_dir.parent, "--clean", "--yes"]
    assert "nothing to delete" in command(runs.main, *line)[1]
    assert newest_of(run_dir, form).exists()
    shutil.rmtree(run_dir / "checkpoints")
    assert command(runs.main, *line)[1].endswith(f"{run_dir}: deleted\n")


@every_format
def test_mirror_begins_no_download_over_a_checkpoint_on_the_disk(
    run_dir, form, tmp_path, monkeypatch
):
    (run_dir / "status.json").unlink()
    mirror = Mirror(f"file://{tmp_path}/mirror", run_dir)
    monkeypatch.setattr(mirror, "_restore", lambda: pytest.fail("the disk has a checkpoint"))
    mirror.begin("auto")


def test_merge_makes_one_file_of_the_best_checkpoint(originals, command, tmp_path):
    output = tmp_path / "best.pt"
    run_dir = originals["sharded"]
    code, printed, errors = command(merge.main, run_dir, "--checkpoint", "best", "--output", output)
    assert code == 0, errors
    assert f"{run_dir}/checkpoints/best.sharded" in printed


def test_sharded_checkpoint_as_weights_is_refused_with_the_command_that_merges_it(
    originals, tmp_path
):
    newest = newest_of(originals["sharded"], "sharded")
    line = " ".join([*SMALL, f"model.weights={newest}", f"runs_dir={tmp_path}/runs", "name=new"])
    ((code, printed),) = run_world(1, refusal_in_world, line)
    assert code == 2
    assert f"model.weights={newest}" in printed
    assert f"of a sharded checkpoint `ddp-lab merge RUN --checkpoint {newest}` makes one" in printed
    assert not (tmp_path / "runs").exists()
