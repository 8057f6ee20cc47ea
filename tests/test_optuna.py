"""A Hydra sweeper that searches: Optuna's, which gets the metric that a run returns."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launches import SMALL, launch
from omegaconf import OmegaConf

from ddp_lab.launchers.sweep import Job, job_return, lower_is_better

# Its own requirements are outdated: it pins optuna below 3, and pip would take a pre-release of Hydra for it.
PACKAGES = ["hydra-optuna-sweeper==1.3.0", "optuna>=4,<6", "alembic", "colorlog", "mako", "sqlalchemy"]


def install(folder: Path) -> None:
    """Install the sweeper and what it needs into a directory of its own, unless it is there. Skip without a registry."""
    if folder.exists():
        return
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--retries", "1", "--target", str(temporary), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode and "connection broken" in done.stderr + done.stdout:
        pytest.skip("the package registry cannot be reached")
    assert done.returncode == 0, done.stderr
    temporary.rename(folder)


@pytest.mark.slow
def test_optuna_finds_the_better_of_two_learning_rates(tmp_path, monkeypatch, request):
    plugins = request.config.cache.mkdir("optuna") / "packages"
    install(plugins)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(plugins), os.environ.get("PYTHONPATH", "")]))
    search = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"]
    # The test set is so small that the worse learning rate could win there.
    run = [*SMALL[:-1], "data.dataset.test_size=1", "data.val_fraction=0.3", "epochs=2", f"runs_dir={tmp_path}/runs"]
    rates = "optimizer.lr=choice(0.000001,0.01)"
    code, output = launch("python train.py -m", *search, *run, rates, f"hydra.sweep.dir={tmp_path}/sweep", cold=True)
    assert code == 0, output
    found = OmegaConf.load(tmp_path / "sweep" / "optimization_results.yaml")
    assert found.best_params == {"optimizer.lr": 0.01}
    rows = [json.loads(line) for path in tmp_path.glob("runs/*/metrics.jsonl") for line in path.read_text().splitlines()]
    assert found.best_value == min(row["val_loss"] for row in rows)


def test_jobs_of_a_sweep_return_the_metric_of_their_run_directory(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1, "val_loss": 2.0, "val_accuracy": 0.5, "test_accuracy": 0.25}\n')
    for optimize, value in (("auto", 2.0), ("val_accuracy", 0.5), ("test_accuracy", 0.25)):
        assert job_return(Job("job", ["seed=1"], tmp_path, 1, optimize, False)).return_value == value
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "val_mae": 2.0}\n{"epoch": 3, "val_mae": 1.0}\n{"epoch": 4, "val_mae": 3.0}\n')
    cfg = OmegaConf.create({"task": {"_target_": "ddp_lab.tasks.Regression"}, "optimize": "val_mae"})
    assert job_return(Job("job", [], tmp_path, 1, "val_mae", False, lower_is_better(cfg))).return_value == 1.0
    assert job_return(Job("job", ["seed=1"], tmp_path / "queued", 1, "auto", False)).return_value is None
