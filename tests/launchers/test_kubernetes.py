"""The manifests in scripts/kubernetes, for Kubeflow Trainer. No cluster is used: a PID namespace stands for a pod."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import warm
import yaml
from launches import ROOT, SMALL, SUPPORT, read_metrics
from slurm_cluster import wait_for

FILES = ROOT / "scripts" / "kubernetes"
SAVE = 30  # seconds that torchrun gives its ranks after SIGTERM


def read(name: str) -> dict:
    return yaml.safe_load((FILES / name).read_text())


def test_pods_of_the_runtime_save_on_sigterm_and_start_again_together():
    runtime = read("runtime.yaml")
    jobs = runtime["spec"]["template"]["spec"]
    (node,) = jobs["replicatedJobs"]
    assert node["name"] == "node", "Trainer finds the pods by these names"
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "node"
    assert pod["terminationGracePeriodSeconds"] > SAVE
    # One failed pod fails the Job, and the JobSet starts all pods again; a preemption is not counted.
    assert (node["template"]["spec"]["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert jobs["failurePolicy"]["maxRestarts"] > 0
    assert jobs["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert node["template"]["spec"]["podFailurePolicy"]["rules"][0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]] == {"emptyDir": {"medium": "Memory"}}
    assert "persistentVolumeClaim" in volumes[mounts["/shared"]]
    arguments = read("trainjob.yaml")["spec"]["trainer"]["args"]
    assert "runs_dir=/shared/runs" in arguments


def start_pod(torchrun: str, tmp_path: Path, *overrides: str) -> subprocess.Popen:
    """Start torchrun as the runtime's pods do: as process 1, with the variables of Trainer and of the runtime."""
    trainer = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1"}
    env = os.environ | trainer | {"PET_MASTER_PORT": "29517", "DDP_LAB_LAUNCH": "uid", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = f"{ROOT}:{SUPPORT}"
    pod = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
    given = [*SMALL, "strategy=ddp", "epochs=8", f"runs_dir={tmp_path}", "name=run", *overrides]
    command = [*pod, torchrun, "-m", "ddp_lab", *given]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="PID namespaces need root")
def test_torchrun_as_process_1_saves_on_sigterm_and_resumes_in_the_same_directory(tmp_path, tmp_path_factory):
    """resume=never applies to the first start of the pod."""
    torchrun = str(warm.agent_shims(tmp_path_factory.mktemp("agents") / "bin") / "torchrun")
    overrides = ["resume=never", "inject=slow@rank=0,step=12"]
    pod = start_pod(torchrun, tmp_path, *overrides)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for("epoch 2", lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, 120, lambda: "")
    (process_1,) = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
    os.kill(int(process_1), signal.SIGTERM)
    output, _ = pod.communicate(timeout=SAVE)
    assert pod.returncode != 0, output
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "preempted", output
    pod = start_pod(torchrun, tmp_path, *overrides)
    output, _ = pod.communicate(timeout=120)
    assert pod.returncode == 0, output
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "finished", output
    assert [line["epoch"] for line in read_metrics(tmp_path / "run")] == list(range(1, 9))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
