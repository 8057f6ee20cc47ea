"""A Hydra launcher that creates a TrainJob of Kubeflow Trainer v2 for every job of a sweep.

python train.py -m hydra/launcher=kubernetes hydra.launcher.trainer.numProcPerNode=4 strategy=scratch,ddp,fsdp

The manifest contains no shell command: the overrides are arguments of torchrun. The name of a TrainJob is derived from its run
directory, so no job is created twice.
"""

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from ddp_lab.config.errors import ConfigError
from ddp_lab.launch.sweep import Job, SweepLauncher, is_finished

# JobSet appends "-node-0-<index>-<5 characters>" to the names of pods, which may have 63 characters.
LONGEST = 40
ENDED = {"Complete", "Failed"}  # conditions of a TrainJob that has ended


class KubernetesLauncher(SweepLauncher):
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

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Create the TrainJobs that are neither finished nor running; as `SweepLauncher.submit_all`.

        Args:
            job_overrides: The Hydra overrides of each job.
            initial_job_idx: Ignored; Hydra passes it.

        Raises:
            ConfigError: A launcher option is wrong, kubectl is not installed or the cluster does not respond.
        """
        self._check_options()
        jobs = self.jobs(job_overrides)
        if self.dry_run:
            manifests = map(self.manifest, jobs)
            print(yaml.safe_dump_all(manifests, explicit_start=True, sort_keys=False, allow_unicode=True))
            return self.results(jobs)
        there = self.trainjobs()
        return self.submit_all(jobs, lambda job: self._create(job, there))

    def _check_options(self) -> None:
        for key in ("numNodes", "numProcPerNode"):
            value = self.trainer.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"hydra.launcher.trainer.{key}={value}: must be an integer of at least 1")
        for key in ("annotations", "labels"):
            plain(f"metadata.{key}", self.metadata.get(key, {}))
        for group, keys, of in ((self.metadata, ["name"], "metadata"), (self.trainer, ["command", "args"], "trainer")):
            for key in keys:
                if key in group:
                    raise ConfigError(f"hydra.launcher.{of}.{key}={group[key]}: is that of each job of the sweep; remove it")

    def manifest(self, job: Job) -> dict[str, Any]:
        """Return the TrainJob of a job."""
        directory = str(self.runs_dir / job.name)
        annotations = {**self.metadata.get("annotations", {}), "ddp-lab/run-directory": directory}
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

    def trainjobs(self) -> dict[str, dict[str, Any]]:
        """Return the TrainJobs of the namespace by name.

        Raises:
            ConfigError: kubectl is not installed on this machine, or the cluster does not respond.
        """
        if shutil.which("kubectl") is None:
            raise ConfigError(
                "hydra/launcher=kubernetes: kubectl is not installed on this machine; start the sweep where it is, or use "
                "hydra.launcher.dry_run=true to see the manifests"
            )
        namespace = [f"--namespace={self.metadata['namespace']}"] if "namespace" in self.metadata else []
        command = ["kubectl", "get", "trainjobs.trainer.kubeflow.org", "--output=json", *namespace]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"hydra/launcher=kubernetes: kubectl get trainjobs: {' '.join(done.stderr.split())}")
        return {item["metadata"]["name"]: item for item in json.loads(done.stdout)["items"]}

    def _create(self, job: Job, there: dict[str, dict[str, Any]]) -> bool:
        """Create the TrainJob of a job unless it is finished or running; return False if the cluster rejects it."""
        manifest = self.manifest(job)
        name = manifest["metadata"]["name"]
        known = there.get(name)
        state = state_of(known) if known else None
        # Another number of epochs is another argument.
        complete = known and state == "Complete" and known["spec"]["trainer"].get("args") == manifest["spec"]["trainer"]["args"]
        if is_finished(job) or complete or (known and state not in ENDED):
            again = "finished" if is_finished(job) or complete else f"created: trainjob {name} {state}"
            print(f"[{job.name}] already {again}", flush=True)
            return True
        there[name] = manifest  # the sweep may contain the same job twice
        # A TrainJob is immutable: one that has ended is deleted and created again.
        verb = ["replace", "--force"] if known else ["create"]
        return self.submit(job, ["kubectl", *verb, "--filename=-"], json.dumps(manifest))


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
