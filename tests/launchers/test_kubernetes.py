"""The manifests for Kubeflow Trainer, and `ddp-lab submit`.

No cluster is used: the CRDs' schemas and a script stand for it.
"""

import io
import os
import sys

import jsonschema
import pytest
import yaml
from launches import ROOT, SUPPORT

from ddp_lab.commands import submit
from ddp_lab.config.compose import quote
from ddp_lab.launchers.command_line import compose_config

FILES = ROOT / "scripts" / "kubernetes"
SCHEMAS = yaml.safe_load((SUPPORT / "trainer_schemas.yaml").read_text())
KUBECTL = """#!/bin/sh
printf '%s\n' "$@" > "$0.arguments"
cat > "$0.input"
echo trainjob.trainer.kubeflow.org/mine created
exit ${CODE:-0}
"""
SAVE = 30  # seconds that torchrun gives its ranks after SIGTERM


def read(name: str) -> dict:
    return yaml.safe_load((FILES / name).read_text())


def test_pods_of_the_runtime_save_on_sigterm_and_start_again_together():
    runtime = read("runtime.yaml")
    jobs = runtime["spec"]["template"]["spec"]
    (node,) = jobs["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert node["name"] == container["name"] == "node", "Trainer finds the pods by these names"
    assert node["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert pod["terminationGracePeriodSeconds"] > SAVE
    # One failed pod fails the Job, and the JobSet starts all pods again; a preemption is not
    # counted.
    assert (node["template"]["spec"]["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert jobs["failurePolicy"]["maxRestarts"] > 0
    assert jobs["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert (
        node["template"]["spec"]["podFailurePolicy"]["rules"][0]["onPodConditions"][0]["type"]
        == "DisruptionTarget"
    )
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]] == {"emptyDir": {"medium": "Memory"}}
    assert "persistentVolumeClaim" in volumes[mounts["/shared"]]
    arguments = read("trainjob.yaml")["spec"]["trainer"]["args"]
    assert "runs_dir=/shared/runs" in arguments


def validate(manifest: dict) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[manifest["kind"]]).validate(manifest)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("runtime.yaml", ["spec", "mlPolicy"]), ("trainjob.yaml", ["spec", "trainer"])],
)
def test_manifest_is_valid_by_the_published_schema(name, wrong):
    manifest = read(name)
    validate(manifest)
    manifest[wrong[0]][wrong[1]]["nodes"] = 2
    with pytest.raises(jsonschema.ValidationError, match="'nodes' was unexpected"):
        validate(manifest)


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """Put a script in place of kubectl; return the file that its arguments are written to."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(KUBECTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program.with_name("kubectl.arguments")


ODD = """/a "b" $(HOME) $X `x` 'c'; #d"""
LINE = [
    "kubernetes",
    "--nodes",
    "2",
    "--gpus",
    "4",
    "--queue",
    "team-a",
    "strategy=ddp",
    "name=mine",
]


@pytest.mark.covers("submit --nodes", "submit --gpus", "submit --queue")
def test_submitted_trainjob_is_printed_and_confirmed_and_has_the_queue_and_the_overrides(
    kubectl, command, monkeypatch
):
    line = [*LINE, f"data.root={quote(ODD)}", "--", "--namespace=team"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("no\n"))
    code, printed, _ = command(submit.main, *line)
    assert (code, kubectl.exists()) == (1, False)
    manifest, last = printed.split("\n\nkubectl create --filename=- --namespace=team\n")
    assert last == "Submit this to kubernetes? [y/N] nothing is done\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert command(submit.main, *line)[0] == 0
    assert kubectl.read_text().splitlines() == ["create", "--filename=-", "--namespace=team"]
    sent = kubectl.with_suffix(".input").read_text()
    assert sent.rstrip() == manifest
    job = yaml.safe_load(sent)
    validate(job)
    assert job["metadata"] == {"name": "mine", "labels": {"kueue.x-k8s.io/queue-name": "team-a"}}
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4}}
    assert trainer["command"] == ["torchrun"]
    module = trainer["args"][:2]
    overrides = [argument.replace("$$", "$") for argument in trainer["args"][2:]]
    assert module == ["-m", "ddp_lab"]
    cfg = compose_config(overrides, None)
    assert (cfg.runs_dir, cfg.name, cfg.data.root) == ("/shared/runs", "mine", ODD)


@pytest.mark.covers("submit --config-dir", "submit --yes")
def test_job_without_a_queue_or_gpus_has_neither(kubectl, command, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text("# @package _global_\nepochs: 7\n")
    line = [
        "kubernetes",
        "--gpus",
        "0",
        "--yes",
        "--config-dir",
        tmp_path,
        "experiment=own",
        "name=mine",
        "runs_dir=/shared/a",
    ]
    code, output, errors = command(submit.main, *line)
    assert (code, errors) == (0, ""), output
    job = yaml.safe_load(kubectl.with_suffix(".input").read_text())
    validate(job)
    assert job["metadata"] == {"name": "mine"}
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["resourcesPerNode"]) == (
        1,
        1,
        {},
    )
    assert trainer["args"][4:] == [
        "--config-dir",
        str(tmp_path),
        "experiment=own",
        "name=mine",
        "runs_dir=/shared/a",
    ]
    assert (
        compose_config(["runs_dir=/shared/runs", *trainer["args"][6:]], str(tmp_path)).runs_dir
        == "/shared/a"
    )


def test_rejection_by_the_scheduler_is_the_exit_code(kubectl, command, monkeypatch):
    monkeypatch.setenv("CODE", "3")
    assert command(submit.main, *LINE, "--yes")[0] == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: scheduler; see ddp-lab submit --help"),
        ("ssh", "argument scheduler: invalid choice: 'ssh' (choose from "),
        ("kubernetes", "name=None: the name of a TrainJob must begin with a letter and have "),
        (
            "kubernetes name=My_run",
            "name=My_run: the name of a TrainJob must begin with a letter and have ",
        ),
        (
            "kubernetes name=a --queue a/b",
            "--queue a/b: must be the name of a LocalQueue of Kueue: ",
        ),
        ("kubernetes name=a epochs=0", "epochs=0: must be an integer "),
        ("slurm --nodes 0", "--nodes 0: must be an integer of at least 1"),
        ("slurm --gpus -1", "--gpus -1: must be an integer of at least 0"),
        (
            "slurm --nodes 2 strategy=dp",
            "--nodes 2: this strategy drives all devices from one process; use --nodes 1",
        ),
        (
            "slurm strategy=ddp --time 2:00:00 name=a -- --mem=1G",
            "--time: is not an option of ddp-lab submit. Options of sbatch follow --: `ddp-lab "
            "submit slurm strategy=ddp name=a -- --time 2:00:00 --mem=1G`",
        ),
        (
            "kubernetes --namespace=team --nodes 2 name=a",
            "--namespace=team: is not an option of ddp-lab submit. Options of kubectl follow --: "
            "`ddp-lab submit kubernetes --nodes 2 name=a -- --namespace=team`",
        ),
        (
            "slurm --nodes 2 --gpus 4 strategy=ddp batch_size=4",
            "batch_size=4: is the global batch and must be divisible by the 8 replicas",
        ),
        ("slurm --config-dir nowhere", "--config-dir nowhere: there is no such directory"),
    ],
)
def test_mistake_is_one_message_and_nothing_is_printed(line, message, command):
    code, output, errors = command(submit.main, *line.split())
    assert (code, output) == (2, "")
    assert errors.startswith(f"error: {message}")
    assert errors.count("\n") == 1


def test_machine_without_the_scheduler_prints_what_to_submit(command, monkeypatch):
    monkeypatch.setenv("PATH", "")
    code, output, errors = command(
        submit.main, "slurm", "strategy=dp", "--queue", "short", "--yes", "--", "--time=9"
    )
    assert code == 2
    assert output.startswith((ROOT / "scripts" / "slurm" / "train.sbatch").read_text())
    expected = (
        "env NPROC_PER_NODE=1 sbatch --nodes=1 --gpus-per-node=1 --partition=short --time=9 "
        "--nodes=1 --job-name=ddp_lab "
    )
    assert output.splitlines()[-1].startswith(expected)
    assert errors.startswith("error: sbatch: is not installed on this machine; ")
