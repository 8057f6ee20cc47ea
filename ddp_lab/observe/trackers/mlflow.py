"""MLflow: on a server, or without one in a SQLite file and a folder of artifacts."""

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_lab.config.build import leaves
from ddp_lab.observe.trackers.base import Media, Status, TrackedRun

# Before mlflow is imported: it would send reports, and write a file to the home directory.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
SERVERS = ("http:", "https:", "databricks")
RUN_ID = "ddp_lab.id"  # the tag by which a launch finds the run that an earlier one has begun
ENDED = {"finished": "FINISHED", "failed": "FAILED"}  # all else is KILLED


class MLflow:
    """A tracker.

    Args:
        experiment: the experiment, which is created if it does not exist.
        tracking_uri: of a server or database; null is MLFLOW_TRACKING_URI, else the file mlflow.db
            in `dir`.
        dir: directory of mlflow.db and of the folder mlartifacts for pictures; null is the run
            directory, and runs_dir for the pictures of a database elsewhere, which other runs
            share. A server has a place of its own for them.
    """

    def __init__(
        self,
        run: TrackedRun,
        experiment: str = "ddp_lab",
        tracking_uri: str | None = None,
        dir: str | None = None,
    ):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        # it reports every table that it makes
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self.metric = Metric
        self.tag = RunTag
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        folder = Path(dir or (run.path.parent if uri else run.path)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        artifacts = None if uri and uri.startswith(SERVERS) else (folder / "mlartifacts").as_uri()
        client = MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        self.client = client

        if existing := client.get_experiment_by_name(experiment):
            experiment_id = existing.experiment_id
        else:
            experiment_id = client.create_experiment(experiment, artifacts)
        if runs := client.search_runs([experiment_id], f"tags.`{RUN_ID}` = '{run.id}'"):
            began = runs[0]
            client.update_run(began.info.run_id, status="RUNNING")
        else:
            began = client.create_run(experiment_id, tags={RUN_ID: run.id}, run_name=run.path.name)

        self.id = began.info.run_id
        if not began.data.params:  # those of the first launch, unless it was killed before
            client.log_batch(
                self.id, params=[Param(name, str(value)) for name, value in leaves(run.config)]
            )
        # of this launch: a param cannot be changed
        client.log_dict(self.id, run.config, "config.yaml")

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int | None) -> None:
        values = {**metrics, **({} if epoch is None else {"epoch": epoch})}
        now = round(1000 * time.time())
        self.client.log_batch(
            self.id, metrics=[self.metric(name, value, now, step) for name, value in values.items()]
        )

    def log_media(self, name: str, media: Media, step: int, epoch: int) -> None:
        if isinstance(media, str):
            self.client.log_text(self.id, media, f"{name}.md")
        else:
            self.client.log_image(self.id, media, f"{name}/epoch_{epoch:06}.png")

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        self.client.log_batch(
            self.id, tags=[self.tag(name, str(value)) for name, value in summary.items()]
        )
        self.client.set_terminated(self.id, ENDED.get(status, "KILLED"))
