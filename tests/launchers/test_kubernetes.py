"""TrainJobs of Kubeflow Trainer: the manifests in scripts/kubernetes, and those of hydra/launcher=kubernetes.

No cluster is used: a program called kubectl records its arguments and its input, and a PID namespace stands for a pod.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from launches import ROOT, SMALL, SUPPORT, launch, read_metrics
from omegaconf import OmegaConf
from slurm_cluster import wait_for

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.command_line import quote
from ddp_lab.launchers.kubernetes import KubernetesLauncher, kubernetes_name
from ddp_lab.launchers.sweep import Job
from ddp_lab.resilience.run_directory import write_status

FILES = ROOT / "scripts" / "kubernetes"
SAVE = 30  # seconds that torchrun gives its ranks after SIGTERM
KUBECTL = """#!{python}
import json, pathlib, sys
folder = pathlib.Path({folder!r})
verb = sys.argv[1]
with (folder / "calls").open("a") as calls:
    print(json.dumps([sys.argv[1:], None if verb == "get" else sys.stdin.read()]), file=calls)
if (folder / "unreachable").exists():
    sys.exit("The connection to the server was refused -\\ndid you specify the right host or port?")
elif verb == "get":
    print((folder / "there").read_text())
elif (folder / "rejected").exists():
    sys.exit("error: admission webhook denied\\nthe request")
else:
    print("trainjob.trainer.kubeflow.org/x created")
"""


def read(name: str) -> dict:
    return yaml.safe_load((FILES / name).read_text())


def make(tmp_path: Path, volume: str = "/shared", **options) -> KubernetesLauncher:
    """Return a launcher of a sweep in `tmp_path`/sweep."""
    trainer = OmegaConf.create({"image": None, "numNodes": 2, "numProcPerNode": 4} | options.pop("trainer", {}))
    launcher = KubernetesLauncher("ddp-lab", volume, options.pop("metadata", {}), trainer, False)
    launcher.config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path / "sweep")}}})
    return launcher


def job(tmp_path: Path, name: str = "strategy=ddp", *overrides: str, one_process: bool = False) -> Job:
    return Job(name, [name, *overrides], tmp_path / "sweep" / name, 3, "auto", one_process)


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Path:
    """Put the recording kubectl first on the PATH, and return its folder."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "kubectl").write_text(KUBECTL.format(python=sys.executable, folder=str(folder)))
    (folder / "kubectl").chmod(0o755)
    (folder / "there").write_text('{"items": []}')
    monkeypatch.setenv("PATH", str(folder))
    return folder


def calls(cluster: Path) -> list[tuple[list[str], str | None]]:
    return [tuple(json.loads(line)) for line in (cluster / "calls").read_text().splitlines()]


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
    assert "persistentVolumeClaim" in volumes[mounts[OmegaConf.load(ROOT / "conf/hydra/launcher/kubernetes.yaml").volume]]
    arguments = read("trainjob.yaml")["spec"]["trainer"]["args"]
    assert f"runs_dir={next(iter(mounts))}/runs" in arguments


@pytest.mark.parametrize("name", ["strategy=ddp,optimizer.lr=0.1", "-", "Ä_ö", "x" * 300])
def test_names_of_trainjobs_are_labels_that_fit_into_names_of_pods(name):
    label = kubernetes_name(name, f"/shared/sweep/{name}")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", label)
    assert len(f"{label}-node-0-9999-abcde") <= 63
    assert label != kubernetes_name(name, f"/shared/other/{name}")
    assert label == kubernetes_name(name, f"/shared/sweep/{name}")


def test_manifest_passes_overrides_as_arguments_that_kubernetes_does_not_expand(tmp_path):
    odd = ["data.root='a $(HOME) $$ `x`; \"y\"'", "e=two\nlines"]
    metadata = {"namespace": "team", "labels": {"queue": "gpus"}, "annotations": {"mine": "1"}}
    launcher = make(tmp_path, metadata=metadata, trainer={"resourcesPerNode": {"limits": {"nvidia.com/gpu": 4}}})
    manifest = launcher.manifest(job(tmp_path, "strategy=ddp", *odd))
    trainer = manifest["spec"]["trainer"]
    expected = ["-m", "ddp_lab", "strategy=ddp", "data.root='a $$(HOME) $$$$ `x`; \"y\"'", "e=two\nlines"]
    assert (trainer["command"], trainer["args"]) == (["torchrun"], expected)
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["resourcesPerNode"]["limits"]) == (
        2,
        4,
        {"nvidia.com/gpu": 4},
    )
    assert "image" not in trainer, "the runtime's image is used"
    assert manifest["metadata"]["namespace"] == "team"
    assert manifest["metadata"]["annotations"] == {"mine": "1", "ddp-lab/run-directory": "/shared/sweep/strategy=ddp"}
    alone = launcher.manifest(job(tmp_path, "strategy=single", one_process=True))["spec"]["trainer"]
    assert (alone["command"], alone["numNodes"], alone["numProcPerNode"]) == (["python"], 1, 1)


def test_trainjobs_are_created_once_and_again_after_they_have_ended(tmp_path, cluster, capsys):
    launcher = make(tmp_path, metadata={"namespace": "team"})
    names = ["created", "running", "failed", "complete", "longer", "finished"]
    jobs = {name: job(tmp_path, f"strategy={name}", "epochs=3") for name in names}
    manifests = {name: launcher.manifest(one) for name, one in jobs.items()}
    (tmp_path / "sweep" / "strategy=finished").mkdir(parents=True)
    write_status(jobs["finished"].run_dir, "finished", 3, 15)

    def known(name: str, *conditions: str) -> dict:
        status = {
            "conditions": [{"type": kind, "status": "True"} for kind in conditions] + [{"type": "Suspended", "status": "False"}]
        }
        return json.loads(json.dumps(manifests[name])) | {"status": status}

    there = [known("running"), known("failed", "Failed"), known("complete", "Complete"), known("longer", "Complete")]
    there[-1]["spec"]["trainer"]["args"][-1] = "epochs=2"
    (cluster / "there").write_text(json.dumps({"items": there}))
    found = launcher.known()
    assert all(launcher.submit(jobs[name], found) for name in [*names, "created"])
    listed, *changes = calls(cluster)
    assert listed == (["get", "trainjobs.trainer.kubeflow.org", "--output=json", "--namespace=team"], None)
    again = ["replace", "--force", "--filename=-"]
    expected = [("created", ["create", "--filename=-"]), ("failed", again), ("longer", again)]
    assert [(arguments, json.loads(str(text))) for arguments, text in changes] == [
        (line, manifests[name]) for name, line in expected
    ]
    output = capsys.readouterr().out
    running = manifests["running"]["metadata"]["name"]
    assert f"[strategy=running] already created: trainjob {running} Running\n" in output
    assert output.count("] already finished\n") == 2
    assert output.count("[strategy=created] trainjob.trainer.kubeflow.org/x created\n") == 1


def test_rejected_trainjob_is_reported_in_one_line(tmp_path, cluster, capsys):
    (cluster / "rejected").touch()
    assert not make(tmp_path).submit(job(tmp_path), {})
    assert capsys.readouterr().out == "[strategy=ddp] not submitted: error: admission webhook denied the request\n"


def test_cluster_that_does_not_respond_is_reported_in_one_line(tmp_path, cluster):
    (cluster / "unreachable").touch()
    with pytest.raises(ConfigError) as error:
        make(tmp_path).known()
    reason = "The connection to the server was refused - did you specify the right host or port?"
    assert str(error.value) == f"hydra/launcher=kubernetes: kubectl failed: {reason}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metadata": 3}, "metadata=3: must be a dictionary"),
        ({"metadata": {"annotations": 3}}, "metadata.annotations=3: must be a dictionary"),
        *(({"trainer": {"numNodes": it}}, f"trainer.numNodes={it}: must be an integer of at least 1") for it in (0, True, "2")),
    ],
)
def test_wrong_options_are_named(tmp_path, options, message):
    def use() -> None:
        launcher = make(tmp_path, **options)
        launcher.check_options()
        launcher.manifest(job(tmp_path))

    with pytest.raises(ConfigError, match=re.escape(f"hydra.launcher.{message}")):
        use()


def test_dry_run_of_a_sweep_prints_the_manifests(tmp_path, cluster):
    value = f"a  b 'c' \"d\" \\e $HOME $(touch {tmp_path}/bad); #é"
    options = ["hydra.launcher.dry_run=true", "hydra.launcher.trainer.resourcesPerNode={limits:{nvidia.com/gpu:4}}"]
    options += [f"hydra.sweep.dir={tmp_path}/sweep", "hydra.launcher.metadata={namespace:team,labels:{a.b/queue:gpus}}"]
    sweep = "python train.py -m hydra/launcher=kubernetes"
    code, output = launch(sweep, *SMALL, *options, f"data.root={quote(value)}", "strategy=ddp,single")
    assert code == 0, output
    manifests = list(yaml.safe_load_all(output))
    assert len({manifest["metadata"]["name"] for manifest in manifests}) == 2
    assert {manifest["metadata"]["labels"]["a.b/queue"] for manifest in manifests} == {"gpus"}
    trainers = [manifest["spec"]["trainer"] for manifest in manifests]
    assert [trainer["command"] for trainer in trainers] == [["torchrun"], ["python"]]
    for trainer, strategy in zip(trainers, ("ddp", "single"), strict=True):
        arguments = [argument.replace("$$", "$") for argument in trainer["args"][2:]]
        parsed = {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(arguments)}
        assert parsed["data.root"] == value
        assert (parsed["runs_dir"], parsed["name"], parsed["strategy"]) == ("/shared/sweep", f"strategy={strategy}", strategy)
    assert not (cluster / "calls").exists()
    assert not (tmp_path / "bad").exists()


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
