"""Trackers: a run of each over crashes and resumes, every row once, and none stops training."""

import json
import os
import shutil
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from launches import (
    SMALL,
    finish,
    launch,
    launch_on_terminal,
    main_in_world,
    read_heartbeat,
    read_metrics,
    start,
    wait_for,
)
from own_trackers import wandb_records
from worlds import run_world

import ddp_lab.observe.trackers.background as background
from ddp_lab import Lab
from ddp_lab.observe.metrics_file import read_rows
from ddp_lab.observe.trackers.base import TrackedRun
from ddp_lab.observe.trackers.mlflow import MLflow
from ddp_lab.resilience.run_directory import read_json

STEPS = 5  # of an epoch of SMALL
ALL = "tracker=[tensorboard,wandb,mlflow,own_trackers.Lines] tracker_options.wandb.mode=offline"


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> Path:
    """MLflow's tables, without a run.

    Making them takes 10 s, on a busy machine longer than a preempted run waits.
    """
    from mlflow import MlflowClient  # takes 1 s, which all processes of pytest would spend

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(scope="module")
def tracked(database, tmp_path_factory) -> Path:
    """A run of two ranks that is killed in epoch two, started again, and resumed to a fourth one.

    All trackers have got the row of step 6 by then: one that was killed before it had noted a row
    would get it again.
    """
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "run").mkdir()
    shutil.copy(database, folder / "run")
    line = (
        f"ddp-lab train --nproc 2 --max-restarts 1 strategy=ddp name=run {' '.join(SMALL)} "
        f"log_every=2 runs_dir={folder} {ALL}"
    )
    process = start(f"{line} epochs=3 inject=hang@rank=0,step=8")
    # W&B's client holds the newest step
    noted = {"wandb": [5, 1], "mlflow": [6, 0], "own_trackers.Lines": [6, 0]}
    files = {folder / "run" / f"tracker.{name}.json": position for name, position in noted.items()}
    wait_for(
        "rows of step 6",
        lambda: all((read_json(file) or {}).get("recorded") == at for file, at in files.items()),
    )
    wait_for("W&B's row of step 5", lambda: wandb_losses(folder / "run"))
    os.kill(read_heartbeat(folder / "run", 0)["pid"], signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    code, output = launch(f"{line} epochs=4")
    assert code == 0, output
    return folder / "run"


def losses(run: Path, name: str = "test_loss") -> list[tuple[int, float]]:
    """Return step and value of each row of metrics.jsonl that has a metric."""
    return [(row["step"], row[name]) for row in read_rows(run / "metrics.jsonl") if name in row]


def wandb_losses(run: Path) -> list[tuple[int, float]]:
    """Return the same of W&B's rows, as far as they are in its files."""
    rows = []
    for record in (
        record
        for file in sorted((run / "wandb").glob("offline-run-*/*.wandb"))
        for record in wandb_records(file)
    ):
        values = {
            "/".join(item.nested_key) or item.key: item.value_json for item in record.history.item
        }
        rows += (
            [(int(values["_step"]), json.loads(values["loss/test"]))]
            if "loss/test" in values
            else []
        )
    return rows


@pytest.mark.slow
def test_own_tracker_gets_every_row_once_and_only_from_rank_0(tracked):
    lines = [json.loads(line) for line in (tracked / "lines.jsonl").read_text().splitlines()]
    assert {line[0] for line in lines} == {"0"}, "several ranks write"
    rows = [tuple(line[2:]) for line in lines if line[1] == "metrics"]
    of_epochs = [(loss, step, epoch) for epoch, (step, loss) in enumerate(losses(tracked), 1)]
    assert [row for row in rows if row[2] is not None] == of_epochs
    assert (
        [row for row in rows if row[2] is None]
        == [(loss, step, None) for step, loss in losses(tracked, "loss")]
        != []
    )
    starts = [line[2:] for line in lines if line[1] == "start"]
    assert len({name for name, _ in starts}) == 1, "a launch began another run"
    assert [epochs for _, epochs in starts] == [3, 3, 4]
    first, last = [line[2:] for line in lines if line[1] == "finish"]
    row = read_metrics(tracked)[-1]
    assert (first[0], last[0], last[1]["result/epoch"], last[1]["result/test_loss"]) == (
        "finished",
        "finished",
        4,
        row["test_loss"],
    )
    assert last[1]["result/checkpoint"].endswith(f"step_{4 * STEPS:08}.pt")
    pictures = Counter(line[2] for line in lines if line[1] == "media")
    assert (pictures["predictions"] >= 4, pictures["confusion"]) == (True, 2)


@pytest.mark.slow
def test_wandb_has_one_id_in_all_folders_and_every_row_once(tracked):
    files = sorted((tracked / "wandb").glob("offline-run-*/*.wandb"))
    state = json.loads((tracked / "tracker.wandb.json").read_text())
    assert [file.stem for file in files] == [f"run-{state['id']}"] * 3
    summary = {}
    for record in (record for file in files for record in wandb_records(file)):
        summary |= {
            item.key or item.nested_key[0]: item.value_json for item in record.summary.update
        }
        if record.WhichOneof("record_type") == "run":
            assert record.run.run_id == state["id"]
            assert (
                json.loads(
                    {item.key: item.value_json for item in record.run.config.update}["optimizer"]
                )["lr"]
                == 0.01
            )
    assert wandb_losses(tracked) == losses(tracked)
    assert summary["result/epoch"] == "4"
    assert list(tracked.glob("wandb/offline-run-*/files/media/images/predictions_*.png"))
    assert list(tracked.glob("wandb/offline-run-*/files/media/images/confusion_*.png"))


@pytest.mark.slow
def test_mlflow_has_one_run_with_every_row_once(tracked):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tracked / 'mlflow.db'}")
    (run,) = client.search_runs(
        [experiment.experiment_id for experiment in client.search_experiments()]
    )
    assert (run.info.run_name, run.info.status, run.data.params["optimizer.lr"]) == (
        "run",
        "FINISHED",
        "0.01",
    )
    assert (
        run.data.tags["ddp_lab.id"]
        == json.loads((tracked / "tracker.mlflow.json").read_text())["id"]
    )
    assert run.data.tags["result/epoch"] == "4"
    history = client.get_metric_history(run.info.run_id, "loss/test")
    assert [(metric.step, metric.value) for metric in history] == losses(tracked)
    of_steps = client.get_metric_history(run.info.run_id, "step/loss")
    assert [(metric.step, metric.value) for metric in of_steps] == losses(tracked, "loss")
    names = {file.name for file in tracked.glob(f"mlartifacts/{run.info.run_id}/artifacts/**/*")}
    assert {"config.yaml", "predictions", "confusion", "epoch_000004.png"} <= names


@pytest.mark.slow
def test_nothing_is_written_outside_the_run_directory(tracked):
    assert [path.name for path in tracked.parent.iterdir()] == ["run"]


def train_small(folder: str, *overrides: str) -> None:
    main_in_world(*SMALL, "epochs=1", f"runs_dir={folder}", "name=run", *overrides)


@pytest.mark.slow
@pytest.mark.covers(
    "tracker_options.wandb.project",
    "tracker_options.wandb.entity",
    "tracker_options.wandb.mode",
    "tracker_options.wandb.dir",
)
def test_options_reach_wandb(tmp_path):
    options = [
        "tracker_options.wandb.project=digits",
        "tracker_options.wandb.entity=us",
        "+tracker_options.wandb.tags=[a]",
    ]
    options += ["tracker_options.wandb.mode=offline", f"tracker_options.wandb.dir={tmp_path}/all"]
    run_world(
        1,
        train_small,
        str(tmp_path),
        "tracker=wandb",
        "checkpoint.mirror=memory://me:secret@host/runs",
        *options,
    )
    (file,) = (tmp_path / "all" / "wandb").glob("offline-run-*/*.wandb")
    (run,) = [
        record.run for record in wandb_records(file) if record.WhichOneof("record_type") == "run"
    ]
    assert (run.project, run.entity, list(run.tags)) == ("digits", "us", ["a"])
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["checkpoint"]["mirror"] == "memory://host/runs", "a password is uploaded"
    assert "tracker_options" not in config


def test_wandb_without_a_key_is_logged_and_does_not_ask_for_it(tmp_path, monkeypatch):
    for name, value in {
        "WANDB_API_KEY": "",
        "WANDB_MODE": "online",
        "HOME": tmp_path,
        "NETRC": tmp_path / "none",
    }.items():
        monkeypatch.setenv(name, str(value))
    shown = launch_on_terminal(
        "python train.py", *SMALL, "epochs=1", "tracker=wandb", f"runs_dir={tmp_path}", "name=run"
    )
    assert "Enter your choice" not in shown
    assert (
        "ERROR tracker=wandb failed (UsageError: No API key configured."
        in (tmp_path / "run" / "train.log").read_text()
    )


def interrupt(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.covers(
    "tracker_options.mlflow.experiment",
    "tracker_options.mlflow.tracking_uri",
    "tracker_options.mlflow.dir",
)
def test_options_reach_mlflow(database, tmp_path):
    from mlflow import MlflowClient

    shutil.copy(database, tmp_path / "other.db")
    places = {
        "all/mlflow.db": f"tracker_options.mlflow.dir={tmp_path}/all",
        "other.db": f"tracker_options.mlflow.tracking_uri=sqlite:///{tmp_path}/other.db",
    }
    for number, (database, place) in enumerate(places.items()):
        options = ["tracker=mlflow", "tracker_options.mlflow.experiment=digits", place]
        run_world(1, train_small, str(tmp_path / str(number)), *options)
        client = MlflowClient(f"sqlite:///{tmp_path / database}")
        (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
        assert run.info.status == "FINISHED"
        assert Path(run.info.artifact_uri.removeprefix("file://")).is_relative_to(tmp_path), (
            "pictures are somewhere else"
        )


@pytest.mark.slow
def test_mlflow_run_whose_launch_was_killed_before_it_had_the_config_gets_it(
    database, tmp_path, monkeypatch
):
    from mlflow import MlflowClient

    place = f"sqlite:///{shutil.copy(database, tmp_path)}"
    run = TrackedRun(tmp_path, "an id", {"optimizer": {"lr": 0.1}}, {}, (1, 0))
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            MLflow(run, tracking_uri=place)
    client = MlflowClient(place)
    later = MLflow(replace(run, config={"optimizer": {"lr": 0.2}}), tracking_uri=place)
    assert client.get_run(later.id).data.params == {"optimizer.lr": "0.2"}
    MLflow(run, tracking_uri=place)
    assert client.get_run(later.id).data.params == {"optimizer.lr": "0.2"}, (
        "a param cannot be changed"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "status"), [("sigterm", "KILLED"), ("raise", "FAILED")])
def test_mlflow_run_that_ends_early_is_closed_with_every_row(fault, status, database, tmp_path):
    """After a preemption, and after an error that is no TrainingError."""
    from mlflow import MlflowClient

    place = f"sqlite:///{shutil.copy(database, tmp_path)}"
    client = MlflowClient(place)
    options = [
        *SMALL,
        "epochs=3",
        "log_every=1",
        f"runs_dir={tmp_path}",
        "name=run",
        f"inject={fault}@rank=0,step=8",
    ]
    code, output = launch(
        "python train.py tracker=mlflow", f"tracker_options.mlflow.tracking_uri={place}", *options
    )
    assert code == (75 if fault == "sigterm" else 1), output
    (run,) = client.search_runs([client.get_experiment_by_name("ddp_lab").experiment_id])
    assert run.info.status == status
    history = client.get_metric_history(run.info.run_id, "step/loss")
    rows = losses(tmp_path / "run", "loss")
    assert ([(metric.step, metric.value) for metric in history], len(rows) >= 6) == (rows, True)


def run_timed(folder: str, overrides: list[str]) -> list[tuple[float, str]]:
    """Train with each tracker; return the time, in seconds, and the log's errors."""
    # an epoch makes three calls at once, for which one that works needs room
    background.QUEUED = 6
    background.WAIT = 1.0
    results = []
    for number, override in enumerate(overrides):
        before = time.monotonic()
        main_in_world(
            *SMALL, "epochs=4", f"runs_dir={folder}", f"name=run{number}", *override.split()
        )
        log = (Path(folder) / f"run{number}" / "train.log").read_text()
        results.append(
            (
                time.monotonic() - before,
                "\n".join(line for line in log.splitlines() if " ERROR " in line),
            )
        )
    return results


@pytest.mark.slow
def test_tracker_that_fails_or_hangs_is_logged_once_and_training_ends(tmp_path):
    problems = {
        "tracker=own_trackers.Failing": "failed (ValueError: no space for step 5 (own_trackers.py, "
        "line ",
        "tracker=own_trackers.Unopened": "failed (ConnectionError: no server (own_trackers.py, "
        "line ",
        "tracker=[own_trackers.Hanging,own_trackers.Lines]": "hangs or is too slow, 6 calls wait: ",
        "tracker=mlflow tracker_options.mlflow.tracking_uri=nothing://": "failed (",
    }
    (results,) = run_world(1, run_timed, str(tmp_path), list(problems))
    for number, ((seconds, errors), (option, problem)) in enumerate(
        zip(results, problems.items(), strict=True)
    ):
        name = option.replace("[", "").split(",")[0].split()[0]
        assert f" ERROR {name} {problem}" in errors, errors
        assert errors.endswith("its records are incomplete; training continues")
        ended = errors.count(" ERROR "), len(read_metrics(tmp_path / f"run{number}")), seconds < 60
        assert ended == (1, 4, True), (errors, seconds)
    assert '"finish"' in (tmp_path / "run2" / "lines.jsonl").read_text(), (
        "a tracker that hangs holds up another"
    )


def log_in_a_lab(folder: Path, epochs: list[int]) -> None:
    options = {"own_trackers": {"Lines": {"file": "mine.jsonl"}}}
    with Lab(
        device="cpu", run_dir=folder, tracker=["own_trackers.Lines"], tracker_options=options
    ) as lab:
        for epoch in epochs:
            lab.log(epoch=epoch, test_loss=float(epoch), note="text")


def test_lab_logs_to_trackers_and_resumes_the_run(tmp_path):
    for epochs in ([0, 1], [1, 2]):  # epoch 1 was not in the checkpoint
        run_world(1, log_in_a_lab, tmp_path, epochs)
    lines = [json.loads(line)[1:] for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert lines[0][1] == lines[4][1], "the second launch began another run"
    assert [line[1:] for line in lines if line[0] == "metrics"] == [
        [0.0, 0, 0],
        [1.0, 1, 1],
        [2.0, 2, 2],
    ]
    assert lines[-1] == [
        "finish",
        "finished",
        {"result/epoch": 2, "result/test_loss": 2.0, "result/note": "text"},
    ]
