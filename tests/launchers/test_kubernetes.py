"""The manifests in scripts/kubernetes, for Kubeflow Trainer. No cluster is used: a PID namespace stands for a pod."""

import yaml
from launches import ROOT

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
