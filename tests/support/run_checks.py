"""Checks of the content of a finished run's directory."""

import json
from pathlib import Path

from launches import read_metrics
from omegaconf import OmegaConf

METRICS = (
    "kind epoch step train_loss train_accuracy test_loss test_accuracy test_top5_accuracy lr "
    "seconds samples_per_second"
)
METRICS += " global_batch_size world_size strategy"


def check_run(
    run_dir: Path, *, epochs: int, strategy: str, world_size: int, also: str = ""
) -> None:
    """Assert that the run directory contains all promised files, and each record once.

    Args:
        run_dir: of the run.
        epochs: of the run.
        strategy: its name.
        world_size: number of ranks.
        also: what a record has besides METRICS.
    """
    entries = {path.name.split(".tfevents")[0] for path in run_dir.iterdir()} - {".launch", ".lock"}
    kept = {
        "config.yaml",
        "data.json",
        "environment.json",
        "metrics.jsonl",
        "train.log",
        "events.out",
        "checkpoints",
        "status.json",
    }
    kept |= {"curves.png", "confusion.png"}
    kept |= {"steps"} if '"kind": "step"' in (run_dir / "metrics.jsonl").read_text() else set()
    assert entries == kept
    assert json.loads((run_dir / "status.json").read_text())["status"] == "finished"
    metrics = read_metrics(run_dir)
    assert [record["epoch"] for record in metrics] == list(range(1, epochs + 1))
    for record in metrics:
        assert record.keys() == {*METRICS.split(), *also.split()}
        assert record["strategy"] == strategy
        assert record["world_size"] == world_size
        assert record["seconds"] > 0
        assert 0 <= record["test_accuracy"] <= 1
    assert OmegaConf.load(run_dir / "config.yaml").runs_dir == str(run_dir.parent)
    log = (run_dir / "train.log").read_text()
    assert log.count("global batch") == 1
    assert log.count("epoch 1: train loss ") == 1
    assert "\r" not in log, "a progress bar in the log file"
    files = {path.name for path in run_dir.glob("checkpoints/*.pt")}
    assert {path.name for path in run_dir.glob("checkpoints/*.sha256")} == {
        f"{name}.sha256" for name in files
    }
    assert len(files) == min(2, epochs), "there is no validation set, so no best checkpoint"
    assert len(list(run_dir.glob("events*"))) == 1
