"""A sweep that searches: Optuna's sweeper, which gets the validation metric of each job."""

import csv
import os
import signal
import time

import pytest
from configs import CONF
from hydra import compose, initialize_config_dir
from launches import SMALL, finish, launch, read_metrics, start
from omegaconf import OmegaConf

from ddp_lab.commands import train
from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.sweep import Job, check_search, job_return, lower_is_better
from ddp_lab.resilience.run_directory import LOCK_WAIT, lock, read_json

# The test set is so small that another job would be the best by it.
SEARCH = [
    *SMALL[:-1],
    "experiment=search",
    "data.dataset.test_size=1",
    "data.val_fraction=0.3",
    "device=cpu",
]

ALONE = [*SEARCH, "strategy=single", "epochs=1"]


def table(folder) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_search_of_two_ranks_goes_on_after_a_kill_with_the_same_jobs(tmp_path):
    """The killed search's running job ends with it: the next search finds no lock."""
    line = [
        "python train.py -m",
        *SEARCH,
        "hydra.sweeper.n_trials=3",
        "epochs=3",
        f"runs_dir={tmp_path}",
    ]
    process = start(*line)
    search = tmp_path / "search"
    deadline = time.monotonic() + 200
    while len(list(search.glob("*/status.json"))) < 2:  # the second job has begun
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    for path in search.glob("*/status.json"):
        lock(path.parent, LOCK_WAIT).close()
    (first,) = [
        path.parent
        for path in search.glob("*/status.json")
        if read_json(path)["status"] == "finished"
    ]
    before = (first / "metrics.jsonl").stat().st_mtime_ns
    code, output = launch(*line)
    assert code == 0, output
    assert output.index(f"[{first.name}] already finished") < output.index("job 2 in")
    assert (first / "metrics.jsonl").stat().st_mtime_ns == before

    rows = table(search)
    import optuna  # takes 2 s, which all processes of pytest would spend

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), direction="maximize")
    for row in rows:  # what an undisturbed search proposes after these results
        trial = study.ask()
        assert (
            row["job"]
            == f"optimizer.lr={trial.suggest_float('optimizer.lr', 0.001, 1.0, log=True)}"
        )
        epochs = read_metrics(search / row["job"])
        assert {epoch["world_size"] for epoch in epochs} == {2}
        assert (row["status"], row["metric"]) == ("finished", "val_accuracy")
        assert float(row["value"]) == max(epoch["val_accuracy"] for epoch in epochs)
        study.tell(trial, float(row["value"]))
    assert {path.parent.name for path in search.glob("*/status.json")} == {
        row["job"] for row in rows
    }
    results = OmegaConf.load(search / "optimization_results.yaml")
    assert results.best_value == study.best_value
    assert (
        f"best of 3: optimizer.lr={results.best_params['optimizer.lr']}, val accuracy "
        f"{results.best_value:.4f}" in output
    )
    assert (search / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_search_learns_that_a_job_diverged_and_runs_no_job_twice(tmp_path):
    line = [*ALONE, f"runs_dir={tmp_path}", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=2"]
    code, output = launch("python train.py -m", *line, "optimizer.lr=choice(0.01,1e30)")
    assert code == 0, output
    assert {(row["job"], row["status"]) for row in table(tmp_path / "search")} == {
        ("optimizer.lr=0.01", "finished"),
        ("optimizer.lr=1e+30", "failed"),
    }
    assert OmegaConf.load(tmp_path / "search" / "optimization_results.yaml").best_params == {
        "optimizer.lr": 0.01
    }
    assert output.count("[optimizer.lr=0.01] result: epoch 1") == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["hydra.sweeper.direction=minimize"],
            "hydra.sweeper.direction=minimize: must be maximize for optimize=val_accuracy",
        ),
        (
            ["optimize=val_loss"],
            "hydra.sweeper.direction=maximize: must be minimize for optimize=val_loss",
        ),
        (
            ["optimize=test_accuracy"],
            "optimize=test_accuracy: hydra/sweeper=optuna must choose by the validation set",
        ),
        (
            ["hydra.sweeper.sampler.seed=null"],
            "hydra.sweeper.sampler.seed=null: a search that is started again",
        ),
        (
            ["hydra.sweeper.n_trials=0"],
            "hydra.sweeper.n_trials=0: must be an integer of at least 1",
        ),
    ],
)
def test_search_that_could_not_learn_is_refused(overrides, message):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(
            "config", overrides=["experiment=search", *overrides], return_hydra_config=True
        )
    with pytest.raises(ConfigError) as error:
        check_search(config)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("chosen", "key"),
    [
        (
            "hydra/launcher=basic",
            "hydra.launcher.nproc_per_node: is set, but the chosen hydra/launcher",
        ),
        ("hydra/sweeper=basic", "hydra.sweeper.direction: is set, but the chosen hydra/sweeper"),
        (
            "hydra/sweeper/sampler=grid",
            "hydra.sweeper.sampler.seed: is set, but the chosen hydra/sweeper/sampler",
        ),
    ],
)
def test_search_with_another_launcher_or_sampler_is_refused_in_one_line(
    chosen, key, command, tmp_path
):
    code, output, errors = command(
        train.main_of_rank, "-m", "experiment=search", chosen, f"runs_dir={tmp_path}"
    )
    assert code == 2, errors
    assert f"error: {key} has no such key. Remove one of the two; experiment=search needs" in errors
    assert "Traceback" not in output + errors


def test_search_without_a_result_ends_with_one_message(tmp_path):
    line = [*ALONE, f"runs_dir={tmp_path}", "hydra.sweeper.n_trials=1", "optimizer.lr=choice(1e30)"]
    code, output = launch("python train.py -m", *line)
    assert code == 1
    assert "error: no job of the search has a result" in output
    assert "Traceback" not in output


def test_jobs_of_a_sweep_return_the_metric_of_their_run_directory(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"epoch": 1, "val_loss": 2.0, "val_accuracy": 0.5, "test_accuracy": 0.25}\n'
    )
    for optimize, value in (("auto", 2.0), ("val_accuracy", 0.5), ("test_accuracy", 0.25)):
        job = Job("job", ["seed=1"], tmp_path, 1, optimize, False)
        assert job_return(job).return_value == value
        assert job_return(job, failed=True).return_value is None
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(
            '{"epoch": 2, "val_mae": 2.0}\n{"epoch": 3, "val_mae": 1.0}\n{"epoch": 4, "val_mae": '
            "3.0}\n"
        )
    cfg = OmegaConf.create(
        {"task": {"_target_": "ddp_lab.tasks.Regression"}, "optimize": "val_mae"}
    )
    assert (
        job_return(Job("job", [], tmp_path, 1, "val_mae", False, lower_is_better(cfg))).return_value
        == 1.0
    )
    assert (
        job_return(Job("job", ["seed=1"], tmp_path / "queued", 1, "auto", False)).return_value
        is None
    )
