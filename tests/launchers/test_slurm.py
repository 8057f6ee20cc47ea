"""Jobs of a real Slurm cluster: scripts/slurm/train.sbatch on two nodes with two ranks each.

Both nodes are on this machine (slurm_cluster.py). Slurm itself kills, requeues and loses the jobs.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launches import ROOT, SMALL, SUPPORT, launch, newest, read_heartbeat, read_metrics, wait_for
from slurm_cluster import LOST, Cluster
from warm import programs

from ddp_lab.config.compose import quote
from ddp_lab.launchers.schedulers import outcome

SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"
EPOCHS = 8
TWO_NODES = ["--nodes=2", "--cpus-per-task=2"]
# Not ddp: on more than two ranks it resumes only up to rounding errors, because DDP's first step
# sums in another order.
OVERRIDES = [*SMALL, "strategy=scratch", f"epochs={EPOCHS}"]
# a step of three seconds in epoch 3, during which the signal arrives
SLOW = "inject=slow@rank=0,step=12"
AGAIN = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), Path(sys.executable).parent)
    if missing := cluster.missing():
        pytest.skip(f"Slurm is not installed (slurm-wlm and munge): no {', '.join(missing)}")
    with cluster:
        yield cluster


class Job:
    """A submitted train.sbatch and its results."""

    def __init__(
        self, cluster: Cluster, runs: Path, options: list[str], *overrides: str, **env: str
    ):
        self.cluster = cluster
        self.runs = runs
        self.out = runs / "job.out"
        options = [f"--chdir={ROOT}", f"--output={self.out}", "--parsable", *options]
        env = {"NPROC_PER_NODE": "2"} | env
        self.id = cluster.run(
            "sbatch", *options, str(SCRIPT), f"runs_dir={runs}", *overrides, **env
        )
        self.dir = runs / f"slurm-{self.id}"

    def report(self) -> str:
        """Return the job's state and output and Slurm's logs, for a failed test."""
        output = self.out.read_text() if self.out.exists() else "(no output)"
        return f"{self.state()}\n{output[-6000:]}\n{self.cluster.logs()}"

    def wait(self, event: str, condition, timeout: float = 300):
        return wait_for(event, condition, timeout, self.report)

    def state(self) -> dict[str, str]:
        return self.cluster.job(self.id)

    def end(self, timeout: float = 240) -> tuple[str, int]:
        """Wait for the end of the job and return its final state and exit code."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
        state = self.wait(
            "end of the job", lambda: (now := self.state())["JobState"] in over and now, timeout
        )
        return state["JobState"], int(state["ExitCode"].split(":")[0])

    def train(self, epochs: int) -> None:
        """Wait until `epochs` epochs are done."""
        metrics = self.dir / "metrics.jsonl"
        self.wait(
            f"epoch {epochs}",
            lambda: metrics.exists() and metrics.read_text().count("\n") >= epochs,
        )

    def start_again(self) -> None:
        """Start the requeued job now; Slurm would wait two minutes."""
        self.wait(
            "requeue", lambda: (now := self.state())["Restarts"] == "1" and now["JobState"] in AGAIN
        )
        # Not in the same second in which it ended: Slurm would confuse the new start with the old
        # one.
        self.cluster.run("scontrol", "update", f"JobId={self.id}", "StartTime=now+2")

    def status(self) -> dict:
        return json.loads((self.dir / "status.json").read_text())


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def assert_as_undisturbed(job: Job, undisturbed: Job) -> None:
    """Assert that a job trained every epoch once and ended with an undisturbed one's weights."""
    assert job.end() == ("COMPLETED", 0), job.report()
    assert job.status()["status"] == "finished"
    assert [line["epoch"] for line in read_metrics(job.dir)] == list(range(1, EPOCHS + 1))
    weights = newest(job.dir)["model"]
    expected = newest(undisturbed.dir)["model"]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def forking(cluster) -> dict[str, str]:
    """Return the environment variables of jobs whose torchrun forks its ranks.

    Signals do not reach their other commands.
    """
    return {
        "PATH": f"{programs() / 'agent'}:{cluster.env['PATH']}",
        "PYTHONPATH": f"{ROOT}:{SUPPORT}",
    }


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory) -> Job:
    """A job that gets no signal, so that its torchrun may be forked from another process."""
    path = f"{programs()}:{cluster.env['PATH']}"
    folder = tmp_path_factory.mktemp("undisturbed")
    job = Job(cluster, folder, TWO_NODES, *OVERRIDES, PATH=path)
    assert job.end() == ("COMPLETED", 0), job.report()
    return job


@pytest.mark.slow
@pytest.mark.parametrize("by", ["time limit", "higher partition"])
def test_preempted_job_is_requeued_and_ends_with_the_same_weights(
    by, cluster, forking, undisturbed, tmp_path
):
    """A higher partition sends SIGTERM to the step's processes, not to the script.

    resume=never is for the first start only.
    """
    job = Job(cluster, tmp_path, TWO_NODES, *OVERRIDES, SLOW, "resume=never", **forking)
    job.train(epochs=2)
    if by == "time limit":
        # what Slurm does for --signal=B:USR1@60
        cluster.run("scancel", "--signal=USR1", "--batch", job.id)
    else:
        cluster.run(
            "sbatch",
            "--partition=high",
            "--nodes=2",
            "--exclusive",
            f"--output={tmp_path}/wanted.out",
            "--wrap=true",
        )
    job.start_again()
    assert job.status()["status"] == "preempted", job.report()
    assert 10 <= job.status()["step"] < 5 * EPOCHS  # 10 if the signal arrived before step 11
    assert_as_undisturbed(job, undisturbed)
    assert job.state()["Restarts"] == "1"


def srun(cluster: Cluster, options: str, *command: str) -> subprocess.CompletedProcess:
    python = str(programs() / "python")
    line = [cluster.programs["srun"], f"--chdir={ROOT}", *options.split(), python, *command]
    env = cluster.env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_tasks_that_are_not_ranks_are_refused_once_and_one_on_each_node_starts_the_ranks(
    cluster, tmp_path
):
    """The second line is the one that the message of the first one advises."""
    runs = f"runs_dir={tmp_path / 'runs'}"
    done = srun(cluster, "--nodes=2 --ntasks=4", "train.py", "strategy=ddp", runs)
    assert done.returncode == 2
    assert (
        done.stderr.count(
            "error: srun started 4 tasks (SLURM_STEP_NUM_TASKS=4), which are not ranks"
        )
        == 1
    ), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--nproc=2", "--nnodes=2", f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1"]
    done = srun(
        cluster,
        "--nodes=2 --ntasks-per-node=1",
        "-m",
        "ddp_lab",
        "train",
        *options,
        *OVERRIDES,
        "epochs=1",
        runs,
    )
    assert done.returncode == 0, done.stderr
    assert "4 ranks, global batch 24" in done.stdout
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.slow
def test_cancelled_job_saves_and_is_not_requeued(cluster, forking, tmp_path):
    job = Job(cluster, tmp_path, TWO_NODES, *OVERRIDES, SLOW, **forking)
    job.train(epochs=2)
    cluster.run("scancel", job.id)
    cluster.run("scancel", job.id)  # a second cancellation must not interrupt the save
    job.wait("message of the script", lambda: "train.sbatch: cancelled" in job.out.read_text())
    assert job.status()["status"] == "preempted", job.report()
    assert job.end()[0] == "CANCELLED"
    assert job.state()["Restarts"] == "0"


def test_overrides_reach_torchrun_unchanged(cluster, tmp_path):
    """The fake torchrun records its arguments.

    Its exit code 0 is no success: no rank recorded the end of the run.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    recorded = tmp_path / "arguments.json"
    torchrun = programs / "torchrun"
    torchrun.write_text(
        f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open({str(recorded)!r}, "
        "'w'))\n"
    )
    torchrun.chmod(0o755)
    bad = tmp_path / "executed"
    overrides = [
        "strategy=ddp",
        "strategy.cut=[a,b]",
        "name=my run",
        f"a=$(touch {bad})",
        f"b=`touch {bad}`; touch {bad}",
        "c='single' \"double\" \\back",
        "d=*",
        "e=two\nlines",
        "$HOME",
        "",
    ]
    path = {"PATH": f"{programs}:{cluster.env['PATH']}"}
    job = Job(cluster, tmp_path, ["--nodes=1"], *overrides, **path)
    assert job.end() == ("FAILED", 1), job.report()
    arguments = json.loads(recorded.read_text())
    module = arguments.index("-m")
    assert arguments[module + 1 :] == [
        "ddp_lab",
        f"name=slurm-{job.id}",
        f"runs_dir={tmp_path}",
        *overrides,
    ]
    assert "--nproc-per-node=2" in arguments
    assert not bad.exists()


def test_outcome_is_the_status_of_this_launch_alone(tmp_path):
    where = [f"runs_dir={tmp_path}", "name=run", "epochs=3"]
    assert outcome("7.1", where) == "none"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text(
        json.dumps({"status": "preempted", "launch": "7.0"})
    )
    assert (outcome("7.0", where), outcome("7.1", where)) == ("preempted", "none")


@pytest.mark.slow
def test_job_of_a_lost_node_does_not_write_beside_its_second_start(cluster, forking, tmp_path):
    """Slurm starts the job of a node that does not respond on the other node.

    The job is still running.
    """
    overrides = [*SMALL, "strategy=ddp", f"epochs={EPOCHS}", "inject=hang@rank=0,step=12"]
    job = Job(cluster, tmp_path, ["--nodes=1"], *overrides, **forking)
    job.train(epochs=2)
    writer = read_heartbeat(job.dir, 0)["pid"]
    torchrun = parent(writer)
    # slurmstepd of this job step; a shell is between it and torchrun
    daemon = parent(parent(torchrun))
    before = (job.dir / "metrics.jsonl").read_text()
    node = job.state()["NodeList"]
    cluster.kill_node(node)
    try:
        job.wait("requeue", lambda: job.state()["Restarts"] == "1", 6 * LOST + 30)
        job.start_again()
        assert job.end() == ("FAILED", 1), job.report()
        output = job.out.read_text()
        assert f"another launch is writing in {job.dir} (pid {writer} on " in output
        assert Path(f"/proc/{writer}").exists(), "the first start must still be running"
        assert (job.dir / "metrics.jsonl").read_text() == before
        assert job.status()["status"] == "running"
    finally:
        os.kill(torchrun, signal.SIGKILL)  # this ends the ranks, too, which Slurm no longer knows
        os.kill(daemon, signal.SIGKILL)
        cluster.start_node(node)
    job.wait("end of the lost node's ranks", lambda: not Path(f"/proc/{writer}").exists(), 20)


@pytest.fixture
def at_cluster(cluster, monkeypatch) -> None:
    """Make launches of the tests use the tests' Slurm."""
    for key, value in cluster.env.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("PATH", f"{programs()}:{cluster.env['PATH']}")
    monkeypatch.setenv("NPROC_PER_NODE", "2")


@pytest.mark.slow
def test_submitted_run_trains_on_the_nodes_asked_for(cluster, at_cluster, tmp_path):
    overrides = [
        *SMALL,
        "strategy=scratch",
        "epochs=1",
        f"runs_dir={quote(str(tmp_path))}",
        "name=mine",
    ]
    options = ["--", f"--output={tmp_path}/job.out", "--parsable"]
    code, output = launch(
        "python -m ddp_lab submit slurm --nodes 2 --gpus 0 --yes", *overrides, *options
    )
    assert code == 0, output
    assert output.startswith(SCRIPT.read_text())
    number = output.split()[-1]

    def report() -> str:
        return (tmp_path / "job.out").read_text() + cluster.logs()

    wait_for("empty queue", lambda: cluster.run("squeue", "--noheader") == "", 300, report)
    assert cluster.job(number)["JobState"] == "COMPLETED", report()
    assert cluster.job(number)["JobName"] == "mine"
    assert [row["world_size"] for row in read_metrics(tmp_path / "mine")] == [4]
