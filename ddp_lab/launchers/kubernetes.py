"""A Hydra launcher that creates a TrainJob of Kubeflow Trainer v2 for every job of a sweep.

python train.py -m hydra/launcher=kubernetes hydra.launcher.trainer.numProcPerNode=4 strategy=scratch,ddp,fsdp

The manifest contains no shell command: the overrides are arguments of torchrun. The name of a TrainJob is derived from its run
directory, so no job is created twice.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.sweep import Job, SchedulerLauncher, ask, is_finished

# JobSet appends "-node-0-<index>-<5 characters>" to the names of pods, which may have 63 characters.
LONGEST = 40
ENDED = {"Complete", "Failed"}  # conditions of a TrainJob that has ended


class KubernetesLauncher(SchedulerLauncher):
    """Create a TrainJob for every job of a sweep.

    Args:
        runtime: Name of the TrainingRuntime that describes the pods (scripts/kubernetes/runtime.yaml).
        volume: Directory at which the runtime mounts the volume of the run directories.
        metadata: Metadata of every TrainJob, as a dictionary: namespace, labels, annotations.
        trainer: `spec.trainer` of every TrainJob, as a dictionary without command and args.
        dry_run: Whether to print the manifests instead of creating the TrainJobs.
    """

    def __init__(self, runtime: str, volume: str, metadata: object, trainer: object, dry_run: bool):
        self.runtime, self.volume, self.dry_run = runtime, Path(volume), dry_run
        self.metadata, self.trainer = plain("metadata", metadata), plain("trainer", trainer)

    @property
    def runs_dir(self) -> Path:
        """The sweep's directory on the volume: itself if it is there, or else a directory of the same name."""
        if self.sweep_dir.is_relative_to(self.volume):
            return self.sweep_dir
        return self.volume / self.sweep_dir.name

    def check_options(self) -> None:
        for key in ("numNodes", "numProcPerNode"):
            value = self.trainer.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"hydra.launcher.trainer.{key}={value}: must be an integer of at least 1")

    def manifest(self, job: Job) -> dict[str, Any]:
        """Return the TrainJob of a job."""
        directory = str(self.runs_dir / job.name)
        annotations = plain("metadata.annotations", self.metadata.get("annotations")) | {"ddp-lab/run-directory": directory}
        alone = {"numNodes": 1, "numProcPerNode": 1} if job.one_process else {}
        # Kubernetes replaces $(NAME) in arguments by an environment variable, and $$ by a dollar sign.
        args = [argument.replace("$", "$$") for argument in ["-m", "ddp_lab", *job.overrides]]
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {**self.metadata, "name": kubernetes_name(job.name, directory), "annotations": annotations},
            "spec": {
                "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": self.runtime},
                "trainer": {**self.trainer, **alone, "command": ["python" if job.one_process else "torchrun"], "args": args},
            },
        }

    def describe(self, jobs: list[Job]) -> str:
        manifests = map(self.manifest, jobs)
        return yaml.safe_dump_all(manifests, explicit_start=True, sort_keys=False, allow_unicode=True)

    def known(self) -> dict[str, dict[str, Any]]:
        namespace = [f"--namespace={self.metadata['namespace']}"] if "namespace" in self.metadata else []
        answer = ask("kubernetes", ["kubectl", "get", "trainjobs.trainer.kubeflow.org", "--output=json", *namespace])
        return {item["metadata"]["name"]: item for item in json.loads(answer)["items"]}

    def submit(self, job: Job, known: dict[str, dict[str, Any]]) -> bool:
        manifest = self.manifest(job)
        name = manifest["metadata"]["name"]
        old = known.get(name)
        state = state_of(old) if old else None
        # Another number of epochs is another argument.
        complete = old and state == "Complete" and old["spec"]["trainer"].get("args") == manifest["spec"]["trainer"]["args"]
        if is_finished(job) or complete or (old and state not in ENDED):
            again = "finished" if is_finished(job) or complete else f"created: trainjob {name} {state}"
            print(f"[{job.name}] already {again}", flush=True)
            return True
        known[name] = manifest  # the sweep may contain the same job twice
        # A TrainJob is immutable: one that has ended is deleted and created again.
        verb = ["replace", "--force"] if old else ["create"]
        return self.run(job, ["kubectl", *verb, "--filename=-"], json.dumps(manifest))


def plain(key: str, value: object) -> dict[str, Any]:
    """Return the value of a launcher option as a dictionary, without keys whose value is null.

    Raises:
        ConfigError: It is not a dictionary.
    """
    found = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    if not isinstance(found, dict | None):
        raise ConfigError(f"hydra.launcher.{key}={value}: must be a dictionary: {{key:value}}")
    return {str(name): item for name, item in (found or {}).items() if item is not None}


def kubernetes_name(name: str, directory: str) -> str:
    """Return a name for a TrainJob: an RFC 1035 label of at most LONGEST characters, unique for each run directory."""
    digest = hashlib.sha256(directory.encode()).hexdigest()[:10]
    words = re.sub(r"[^a-z0-9]+", "-", name.lower())
    return f"{f'ddp-lab-{words}'[: LONGEST - 11].rstrip('-')}-{digest}"


def state_of(trainjob: Mapping[str, Any]) -> str:
    """Return the last condition of a TrainJob that is true; Running if it has none."""
    conditions = trainjob.get("status", {}).get("conditions", [])
    return ([item["type"] for item in conditions if item["status"] == "True"] or ["Running"])[-1]
