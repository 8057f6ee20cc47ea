"""Sweeps as users start them: every job is a launch of its own."""

import csv
import json
import os
import signal

import pytest
import torch
from hydra import compose, initialize_config_dir
from launches import ROOT, SMALL, finish, launch, read_heartbeat, read_metrics, start, wait_for
from omegaconf import OmegaConf

from ddp_lab.config.compose import quote
from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.sweep import (
    LONGEST,
    Job,
    by_swept,
    directory_name,
    is_finished,
    reason_of,
)
from ddp_lab.launchers.torchrun_launcher import TorchrunLauncher
from ddp_lab.observe.plot import figure
from ddp_lab.resilience.run_directory import write_status

SWEEP = "python train.py -m"


def sweep_overrides(tmp_path, *more: str) -> list[str]:
    return [*SMALL[:-1], "epochs=1", f"hydra.sweep.dir={tmp_path}/sweep", *more]


def jobs(tmp_path) -> dict[str, str]:
    """Return the status of each job by strategy and learning rate."""
    results = {}
    for path in (tmp_path / "sweep").glob("*/status.json"):
        parts = dict(part.split("=", 1) for part in path.parent.name.split(",") if "=" in part)
        results[parts["strategy"] + " " + parts.get("optimizer.lr", "")] = json.loads(
            path.read_text()
        )["status"]
    return results


def test_failed_job_does_not_end_the_sweep_and_only_it_runs_again(tmp_path):
    line = sweep_overrides(
        tmp_path,
        "hydra.launcher.nproc_per_node=2",
        "strategy=scratch,single",
        "optimizer.lr=0.01,-1",
    )
    code, output = launch(SWEEP, *line)
    assert code == 1, output
    assert jobs(tmp_path) == {"scratch 0.01": "finished", "single 0.01": "finished"}
    rates = {
        path.parent.name: read_metrics(path.parent)[-1]["samples_per_second"]
        for path in (tmp_path / "sweep").glob("*/metrics.jsonl")
    }
    sizes = {
        path.parent.name.split("strategy=")[1].split(",")[0]: read_metrics(path.parent)[0][
            "world_size"
        ]
        for path in (tmp_path / "sweep").glob("*/metrics.jsonl")
    }
    assert sizes == {"scratch": 2, "single": 1}, "a one-process strategy must get one rank"
    *summary, results = output.strip().splitlines()[-5:]
    assert results == f"results: {tmp_path}/sweep/results.csv"
    with (tmp_path / "sweep" / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["status"], row["metric"], bool(row["value"])) for row in rows] == [
        ("finished", "test_accuracy", True),
        ("", "test_accuracy", False),
    ] * 2
    assert [": finished, test accuracy" in row for row in summary] == [True, False, True, False], (
        output
    )
    assert all("did not start (exit code" in row for row in summary[1::2])
    for row in summary[::2]:
        name = row.split(": finished")[0].split("] ")[-1].strip()
        assert row.endswith(f", {rates[name]:,.0f} samples/s")
    assert "optimizer.lr=-1: must be a number above 0" in output
    code, output = launch(SWEEP, *line)
    assert code == 1
    assert output.count("] already finished") == 2
    assert output.count("must be a number above 0") == 2, "the failed jobs must run again"


@pytest.mark.slow
@pytest.mark.covers("train --config-dir")
def test_concurrent_jobs_use_different_ports(tmp_path):
    """It starts as a module in another directory, with a Hydra option and a group of the user's."""
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nwarmup_epochs: 0.5\n"
    )
    sweep = "python -m ddp_lab -m --config-dir own experiment=mine"
    line = sweep_overrides(
        tmp_path,
        "hydra.launcher.nproc_per_node=2",
        "hydra.launcher.max_parallel=2",
        "strategy=scratch,ddp",
    )
    code, output = launch(sweep, *line, "optimizer.lr=0.01", cwd=tmp_path)
    assert code == 0, output
    assert jobs(tmp_path) == {"scratch ": "finished", "ddp ": "finished"}
    assert all(
        OmegaConf.load(path).warmup_epochs == 0.5
        for path in (tmp_path / "sweep").glob("*/config.yaml")
    )
    code, output = launch(sweep, *line, "optimizer.lr=0.02", cwd=tmp_path)
    assert code == 2
    assert "strategy=scratch was started there with another optimizer.lr (0.01, now 0.02)" in output
    assert all(line.startswith("[") for line in output.splitlines() if "train loss" in line)


def test_interrupted_sweep_saves_its_running_job_and_starts_no_other(tmp_path):
    line = sweep_overrides(
        tmp_path, "hydra.launcher.nproc_per_node=2", "strategy=ddp,single", "optimizer.lr=0.01"
    )
    process = start(SWEEP, *line, "data.dataset.train_size=24000", "epochs=50")
    runs = tmp_path / "sweep"
    wait_for(
        "step",
        lambda: any(
            (read_heartbeat(path, 1) or {"step": 0})["step"] > 0 for path in runs.glob("*")
        ),
        120,
    )
    os.kill(process.pid, signal.SIGINT)
    code, output = finish(process, timeout=60)
    assert code == 130, output
    assert (
        "the sweep was interrupted; the same command with its hydra.sweep.dir resumes it" in output
    )
    assert "strategy=single: did not start" not in output
    assert jobs(tmp_path) == {"ddp ": "preempted"}


def test_job_is_finished_after_all_its_epochs_or_early_stopping(tmp_path):
    shorter, longer = (
        Job("job", [], tmp_path, {"epochs": epochs}, "auto", False) for epochs in (5, 9)
    )
    assert not is_finished(shorter)
    write_status(tmp_path, "preempted", 5, 25)
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 2}\n{"epoch": 5}\n{"epoch": 3, "val_accur')
    assert not is_finished(shorter)
    (tmp_path / "config.yaml").write_text("epochs: 5\n")
    write_status(tmp_path, "finished", 3, 15)
    with pytest.raises(
        ConfigError, match=r"metrics\.jsonl: lacks epoch 3 of a finished run.* Delete"
    ):
        is_finished(shorter)
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 3}\n{"epoch": 5}\n')
    assert is_finished(shorter)
    assert is_finished(longer)
    write_status(tmp_path, "finished", 5, 25)
    assert is_finished(shorter)
    assert not is_finished(longer)


def slots(nproc_per_node: int, max_parallel: int, device: str = "auto") -> list[str | None]:
    launcher = TorchrunLauncher(nproc_per_node, max_parallel)
    launcher.config = OmegaConf.create({"device": device})
    return list(launcher._slots().queue)


@pytest.mark.parametrize(
    ("values", "label", "scale", "points"),
    [
        (
            {"optimizer.lr=1.0": 0.5, "optimizer.lr=0.01": 0.2},
            "optimizer.lr",
            ("log", "linear"),
            [[0.01, 0.2], [1.0, 0.5]],
        ),
        (
            {"epochs=3": 20.0, "epochs=2": 1.0},
            "epochs",
            ("linear", "log"),
            [[2.0, 1.0], [3.0, 20.0]],
        ),
        (
            {"strategy=ddp,optimizer.lr=0.1": 0.5, "strategy=fsdp,optimizer.lr=0.2": 0.2},
            "val accuracy",
            ("linear", "linear"),
            [[0.5, 0.0], [0.2, 1.0]],
        ),
    ],
)
def test_picture_of_a_sweep_is_labelled_by_what_was_swept(values, label, scale, points):
    drawn = figure([by_swept("sweep", "val accuracy", values)])
    drawn.draw_without_rendering()
    (axes,) = drawn.subfigs[0].axes
    assert axes.get_xlabel() == label
    assert (axes.get_xscale(), axes.get_yscale()) == scale
    assert axes.lines[0].get_xydata().tolist() == points
    if len(next(iter(values)).split(",")) > 1:
        names = [text.get_text() for text in axes.get_yticklabels()]
        assert names == ["strategy=ddp, lr=0.1", "strategy=fsdp, lr=0.2"]


def test_concurrent_jobs_get_separate_gpus_or_are_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert slots(2, 2) == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert slots(1, 3) == ["7", "5", "3"]
    with pytest.raises(ConfigError) as error:
        slots(2, 3)
    assert str(error.value) == (
        "hydra.launcher.max_parallel=3: concurrent jobs of 2 ranks need 6 GPUs, but this machine "
        "shows 4; lower max_parallel or nproc_per_node, or set device=cpu"
    )
    assert slots(2, 3, device="cpu") == [None, None, None]


def test_options_that_the_launcher_cannot_use_are_named(tmp_path):
    def refusal(function, *args) -> str:
        with pytest.raises(ConfigError) as error:
            function(*args)
        return str(error.value)

    assert refusal(slots, 1, 0) == "hydra.launcher.max_parallel=0: must be an integer of at least 1"
    (tmp_path / "file").touch()
    where = f"{tmp_path}/file/sweep"
    launcher = TorchrunLauncher(1, 1)
    config = OmegaConf.create({"hydra": {"sweep": {"dir": where}}})
    reported = refusal(
        lambda: launcher.setup(hydra_context=None, task_function=None, config=config)
    )
    assert (
        reported
        == f"hydra.sweep.dir={where}: cannot write to it (Not a directory); use another directory"
    )


@pytest.mark.parametrize(
    "value", ["a b", "a'b", "a\\b", "a\\", "a\\'b", "a\\\\b'\\\\", '$(x) `y` "z", {k: v} [1]=#']
)
def test_quoted_values_reach_hydra_unchanged(value):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        assert compose("config", overrides=[f"runs_dir={quote(value)}"]).runs_dir == value


def test_directory_names_are_plain_short_and_unique():
    assert directory_name(["strategy=ddp", "optimizer.lr=0.1"]) == "strategy=ddp,optimizer.lr=0.1"
    odd = [directory_name([f"data.mean=[{value}]"]) for value in ("0.1", "0.2")]
    assert odd[0] != odd[1]
    assert odd[0].startswith("data.mean=-0.1--")
    assert len(directory_name(["x=" + 300 * "y"])) < LONGEST + 20


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            "error: the loss of step 3 is not finite\nmore",
            "error: the loss of step 3 is not finite",
        ),
        (
            "error: rank 0, starting: failed:\n    f(x)\n  File 'a.py', line 1\nKeyError: 'x'\nThe",
            "error: rank 0, starting: failed: KeyError: 'x'",
        ),
        ("error: rank 0: failed:\n    f(x)", "error: rank 0: failed:"),
    ],
)
def test_reason_of_a_failed_job_is_one_line_with_its_exception(message, reason):
    assert reason_of(message) == reason
