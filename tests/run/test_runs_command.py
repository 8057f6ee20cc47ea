"""`ddp-lab runs`: the table, the curves, and what --clean deletes and leaves."""

import io
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launches import SMALL, launch

from ddp_lab.commands import runs
from ddp_lab.resilience.run_directory import write_status
from ddp_lab.run.runs import last_change

LOCKED = (
    "import sys, pathlib, ddp_lab.resilience.run_directory as r; _ = "
    "r.lock(pathlib.Path(sys.argv[1]), 0); print(); input()"
)


def make(path: Path, status: str, host: str = "", age: float = 0) -> Path:
    """Make the directory of a run without an epoch, launched on a machine `age` seconds ago."""
    path.mkdir(parents=True)
    (path / ".launch").write_text("an id")
    (path / ".lock").write_text(
        f"pid 1 on {host or socket.gethostname()} since 2026-11-24 10:00:00"
    )
    (path / "config.yaml").write_text("seed: 0\nepochs: 20\n")
    write_status(path, status, 1, 3)
    return touch(path, age)


def touch(path: Path, age: float) -> Path:
    """Let a directory and the files in it have changed `age` seconds ago."""
    for each in (*path.iterdir(), path):
        os.utime(each, (time.time() - age,) * 2)
    return path


@pytest.fixture
def running(tmp_path):
    """Return a run directory in which another process is writing."""
    path = make(tmp_path / "runs" / "running", "running")
    with subprocess.Popen(
        [sys.executable, "-c", LOCKED, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"\n"
        yield path
        process.communicate(b"\n")


def add_epoch(path: Path, epoch: int = 1, step: int = 4, **metrics: float) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"epoch": epoch, "step": step, "samples_per_second": 1234.5, **metrics})
            + "\n"
        )


@pytest.mark.covers("runs --runs-dir")
def test_table_has_state_epoch_best_rate_and_age_of_each_run(running, tmp_path, command):
    root = running.parent
    killed = make(root / "sweep-1" / "lr=1", "running")
    add_epoch(killed, val_accuracy=0.5, val_loss=2)
    touch(killed, 7300)
    chosen = make(root / "chosen", "finished")
    (chosen / "data.json").write_text('{"criterion": "val_accuracy"}')
    (chosen / "checkpoints").mkdir()
    (chosen / "checkpoints" / "best.pt").symlink_to("step_00000008.pt")
    for epoch, accuracy in ((1, 0.5), (2, 0.75), (3, 0.625)):  # the last one has the lowest loss
        add_epoch(chosen, epoch, 4 * epoch, val_accuracy=accuracy, val_loss=3 / epoch)
    touch(chosen, 86400 * 3 + 9)
    code, output, errors = command(runs.main, "--runs-dir", root)
    assert (code, errors) == (0, "")
    head, *rows = [line.split() for line in output.splitlines()]
    assert head == [*runs.HEAD]
    lines = {name: " ".join(row) for name, *row in rows}
    assert next(iter(lines)) == "chosen", "the run that changed last is at the end"
    assert lines["chosen"] == "finished 3/20 val_accuracy 0.7500 1,234 3 d"
    assert lines["running"].startswith("running 0/20 - - ")
    assert lines["sweep-1/lr=1"] == "killed 1/20 val_loss 2.0000 1,234 2 h"
    assert command(runs.main, "--runs-dir", chosen)[:2] == (
        0,
        f"no runs in {chosen}; --runs-dir DIR is the runs_dir of your runs\n",
    )
    assert command(runs.main, "--runs-dir", root / "nowhere")[0] == 0


def test_curves_and_the_error_of_a_trained_run_are_shown(tmp_path, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    line = (
        "python train.py device=cpu strategy=single epochs=4 name=mine inject=raise@rank=0,step=14"
    )
    code, output = launch(line, *SMALL, "data.val_fraction=0.2", f"runs_dir={tmp_path}")
    assert code == 1, output
    code, output, _ = command(runs.main, "show", "mine", "--runs-dir", tmp_path)
    assert code == 0
    head, error, loss, accuracy = output.rstrip().split("\n\n")
    assert head.splitlines()[1].split()[:4] == ["mine", "failed", "3/4", "val_loss"]
    assert error.startswith("error: rank 0 on ")
    rows = [
        json.loads(row) for row in (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()
    ]
    values = [row[f"{name}_loss"] for row in rows for name in ("train", "val", "test")]
    legend, *drawn, axis = loss.splitlines()
    assert legend == "loss: . train, o val, x test"
    assert drawn[0].startswith(f"{max(values):>10.4g} |")
    assert drawn[-1].startswith(f"{min(values):>10.4g} |")
    assert {mark for row in drawn for mark in row.partition("|")[2]} == {*" .ox"}
    assert max(map(len, drawn)) == 59
    assert axis.split() == ["epoch", "1", str(rows[-1]["epoch"])]
    assert accuracy.startswith("accuracy: ")


@pytest.mark.covers("runs --clean", "runs --yes")
def test_clean_deletes_only_empty_runs_that_nothing_writes_in_and_only_when_told(
    running, tmp_path, command, monkeypatch
):
    root = running.parent
    here = {"host": "", "age": 9}
    empty = [
        make(root / "failed", "failed", **here),
        make(root / "sweep" / "killed", "running", **here),
    ]
    empty += [make(root / "old", "preempted", "elsewhere", 2 * 86400)]
    elsewhere = make(root / "elsewhere", "running", "elsewhere", 3600)
    trained = make(root / "trained", "failed", **here)
    saved = make(root / "saved", "interrupted", **here)
    add_epoch(trained)
    (saved / "checkpoints").mkdir()
    (saved / "checkpoints" / "step_00000003.pt").touch()
    outside = make(tmp_path / "outside" / "run", "failed", **here)
    (root / "linked").symlink_to(outside)
    (root / "folder").symlink_to(outside.parent)
    (empty[0] / "data").symlink_to(outside)
    (root / "notes").mkdir()
    everything = {path for path in root.rglob("*") if path.name != ".lock"}
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    asked = command(runs.main, "--runs-dir", root, "--clean")
    assert asked[0] == 1
    assert asked[1].endswith(f"Delete {empty[2]}, {empty[1]}, {empty[0]}? [y/N] nothing is done\n")
    assert {path for path in root.rglob("*") if path.name != ".lock"} == everything
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    code, output, errors = command(runs.main, "--runs-dir", root, "--clean")
    assert (code, errors, output.count(": deleted\n")) == (0, "", 3)
    assert not any(path.exists() for path in empty)
    left = {
        elsewhere,
        trained,
        saved,
        running,
        root / "linked",
        root / "folder",
        root / "notes",
        root / "sweep",
    }
    assert {*root.iterdir()} == left
    assert (outside / "config.yaml").exists()
    make(root / "more", "failed")
    assert command(runs.main, "--runs-dir", root, "--clean", "--yes")[0] == 0
    assert {*root.iterdir()} == left
    assert "nothing to delete" in command(runs.main, "--runs-dir", root, "--clean", "--yes")[1]


def test_run_in_which_a_launch_begins_after_the_question_is_kept(running, command, monkeypatch):
    path = make(running.parent / "again", "failed")
    monkeypatch.setattr(runs, "confirm", lambda question, yes: add_epoch(path))
    code, output, _ = command(runs.main, "--runs-dir", path.parent, "--clean")
    assert (code, output.endswith(f"{path}: kept: a launch has begun in it\n")) == (0, True)
    (path / "metrics.jsonl").unlink()
    (run_found,) = (run for run in runs.find_runs(path.parent) if run.path == path)
    with subprocess.Popen(
        [sys.executable, "-c", LOCKED, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"\n"
        assert not run_found.remove()
        process.communicate(b"\n")
    assert run_found.remove()


def test_damaged_files_and_a_narrow_terminal_hide_no_run(tmp_path, command, monkeypatch):
    path = make(tmp_path / "damaged", "finished")
    add_epoch(path, 1, val_loss=2.0)
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b"\x00\xff{\n")
    add_epoch(path, 2, 8, val_loss=1.0)
    (path / "config.yaml").write_bytes(b"\xff{")
    (path / "status.json").write_text("[")
    monkeypatch.setenv("COLUMNS", "5")
    code, output, errors = command(runs.main, "show", "damaged", "--runs-dir", tmp_path)
    assert (code, errors) == (0, "")
    assert "damaged  not started  2/?    val_loss 1.0000" in output
    assert output.splitlines()[-1].split() == ["epoch", "1", "2"]


def test_run_is_shown_by_its_name_and_by_its_directory(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "sweep/job"):
        add_epoch(make(tmp_path / "runs" / name, "finished"), 1, 2, val_loss=2.0)
    (tmp_path / "mine").mkdir()  # of the same name, and no run
    for name in ("mine", "sweep/job"):
        shown = [
            command(runs.main, *words)
            for words in (
                [name],
                ["show", name],
                [f"runs/{name}"],
                [f"{tmp_path}/runs/{name}", "--runs-dir", f"{tmp_path}/runs"],
            )
        ]
        assert all((code, errors) == (0, "") for code, _, errors in shown), shown
        rows = [output.splitlines()[1].split()[:4] for _, output, _ in shown]
        assert rows == [[name, "finished", "1/20", "val_loss"]] * 4
    code, output, _ = command(runs.main, "../runs/mine", "--runs-dir", "elsewhere")
    assert code == 2, output


USAGE = "ddp-lab runs: needs nothing, [show] NAME, diff NAME NAME, or --clean with or without"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((line, USAGE) for line in ("show", "show a b", "trained-2 --clean", "--yes", "diff a")),
        *(
            (
                line,
                "trained: there is no such run: it is neither the directory of a run nor the name "
                "of one in {ROOT}. Did you mean trained-2? `ddp-lab runs` lists the names",
            )
            for line in ("show trained", "trained")
        ),
        (
            "--runs-dir /dev/null",
            "--runs-dir /dev/null: is not a directory that can be read. Use the runs_dir of your "
            "runs",
        ),
    ],
)
def test_mistake_is_one_message(line, message, tmp_path, command):
    make(tmp_path / "trained-2", "failed")
    root = [] if "--runs-dir" in line else ["--runs-dir", tmp_path]
    code, output, errors = command(runs.main, *line.split(), *root)
    assert (code, output) == (2, "")
    assert errors.startswith(f"error: {message.format(ROOT=tmp_path)}")
    assert errors.count("\n") == 1


def test_file_that_a_running_launch_renames_meanwhile_is_left_out(tmp_path, monkeypatch):
    run = make(tmp_path / "run", "running", age=50)
    before = last_change(run)
    entries = [*run.iterdir(), run / "tracker.mlflow.tmp"]
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(entries))
    assert last_change(run) == before
