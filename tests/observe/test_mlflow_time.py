"""MLflow's timestamps are milliseconds since 1970, by the clock of the machine."""

import time

from ddp_lab.observe.trackers.base import TrackedRun
from ddp_lab.observe.trackers.mlflow import MLflow


class Client:
    """Keeps what is logged, in place of MLflow's client, whose tables take 10 s."""

    def __init__(self, *arguments):
        self.logged = []

    def get_experiment_by_name(self, name):
        return type("Experiment", (), {"experiment_id": "1"})

    def search_runs(self, experiments, query):
        info = type("Info", (), {"run_id": "a"})
        data = type("Data", (), {"params": {"lr": "1"}})
        return [type("Run", (), {"info": info, "data": data})]

    def update_run(self, *arguments, **options):
        pass

    log_dict = update_run

    def log_batch(self, run_id, metrics=()):
        self.logged += metrics


def test_metrics_have_the_time_in_milliseconds_and_the_step(tmp_path, monkeypatch):
    from mlflow import MlflowClient  # takes 4 s, which all processes of pytest would spend

    for name in (
        "__init__",
        "get_experiment_by_name",
        "search_runs",
        "update_run",
        "log_dict",
        "log_batch",
    ):
        monkeypatch.setattr(MlflowClient, name, getattr(Client, name))
    tracker = MLflow(TrackedRun(tmp_path, "id", {}, {}, (1, 0)))
    before = time.time_ns() // 10**6
    tracker.log_metrics({"loss/val": 0.5}, step=7, epoch=2)
    after = time.time_ns() // 10**6
    assert [(each.key, each.value, each.step) for each in tracker.client.logged] == [
        ("loss/val", 0.5, 7),
        ("epoch", 2, 7),
    ]
    assert all(before <= each.timestamp <= after + 1 for each in tracker.client.logged)
