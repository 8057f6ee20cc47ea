"""The launch of a run by a scheduler: Slurm's script, and the TrainJob of Kubeflow Trainer v2.

python -m ddp_lab.launchers.schedulers LAUNCH [OVERRIDE...] prints, for train.sbatch, the status
that the launch with torchrun's run id LAUNCH recorded in the run directory that the overrides
determine. It does not load torch, which takes seconds on a busy disk.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.command_line import compose_config, split_config_dir

SCRIPT = Path(__file__).with_name("train.sbatch")  # in a clone a link to scripts/slurm/train.sbatch
# in a clone a link to scripts/kubernetes/trainjob.yaml
TEMPLATE = Path(__file__).with_name("trainjob.yaml")
ON_VOLUME = ("runs_dir", "data.root")  # keys that the template sets to directories of the volume
QUEUE = "kueue.x-k8s.io/queue-name"  # the label by which Kueue knows the LocalQueue of a TrainJob
# Kubernetes appends "-node-0-<index>-<5 characters>" to the names of pods, which may have 63
# characters.
NAME = re.compile("[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
LOCAL_QUEUE = re.compile("[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
# overrides that determine the run directory
WHERE = re.compile(r"\+{0,2}(name|runs_dir|experiment)=")


def trainjob(
    name: str | None, nodes: int, gpus: int, ranks: int, queue: str | None, overrides: Sequence[str]
) -> dict[str, Any]:
    """Return the manifest of a run.

    Args:
        name: the config's `name`, which becomes the TrainJob's.
        nodes: number of pods.
        gpus, ranks: GPUs and ranks of each pod.
        queue: name of Kueue's LocalQueue; None: Kueue is not used.
        overrides: Hydra overrides. Those of the template for ON_VOLUME come before them, so that
            these count.

    Raises:
        ConfigError: a name is missing or is not allowed in Kubernetes.
    """
    if not NAME.fullmatch(name or ""):
        raise ConfigError(
            f"name={name}: the name of a TrainJob must begin with a letter and have at most 40 "
            "lower-case letters, digits and hyphens; use, for example, name=mine"
        )
    if queue is not None and not LOCAL_QUEUE.fullmatch(queue):
        raise ConfigError(
            f"--queue {queue}: must be the name of a LocalQueue of Kueue: lower-case letters, "
            "digits, hyphens, dots"
        )

    manifest = yaml.safe_load(TEMPLATE.read_text())
    trainer = manifest["spec"]["trainer"]
    first = [
        argument
        for argument in trainer["args"]
        if argument.partition("=")[0] in ("-m", "ddp_lab", *ON_VOLUME)
    ]
    # Kubernetes replaces $(NAME) in arguments by an environment variable, and $$ by a dollar sign.
    args = [*first, *(override.replace("$", "$$") for override in overrides)]
    trainer |= {"numNodes": nodes, "numProcPerNode": ranks, "args": args}
    trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": gpus}} if gpus else {}
    manifest["metadata"] = {"name": name} | ({"labels": {QUEUE: queue}} if queue else {})
    return manifest


def outcome(launch: str, arguments: list[str]) -> str:
    """Return the `status` of status.json; "none" if this launch has not written one."""
    config_dir, overrides = split_config_dir(arguments)
    cfg = compose_config([override for override in overrides if WHERE.match(override)], config_dir)
    try:
        record = json.loads(Path(cfg.runs_dir, cfg.name, "status.json").read_text())
    except OSError:
        return "none"
    return record["status"] if record["launch"] == launch else "none"  # another launch wrote it


if __name__ == "__main__":
    print(outcome(sys.argv[1], sys.argv[2:]))
