"""A run over two machines with their own host names, /dev/shm and network, which share only the run directory."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from launches import SMALL, finish, launch, read_metrics
from machines import Machine, two_machines
from slurm_cluster import wait_for

from ddp_lab.resilience.run_directory import read_json

pytestmark = pytest.mark.slow

EPOCHS = 4
OVERRIDES = [*SMALL, "strategy=scratch", f"epochs={EPOCHS}", "checkpoint.every_steps=3", "name=run"]
REPORTED = 10.0  # seconds within which a lost node is reported
BUSY = 5.0  # additional seconds on a busy machine


def start_node(machines: list[Machine], node: int, runs: Path):
    """Start torchrun on a machine. Node 1 sleeps before step 8 and node 0 before step 14: there the test interferes."""
    options = "--nnodes=2 --nproc_per_node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-id=run"
    endpoint = f"--rdzv-endpoint={machines[0].name}:29500 --rdzv-conf=is_host={1 - node}"
    fault = f"inject=slow@rank={node},step={14 - 6 * node}"
    line = f"python -m ddp_lab train {options} {endpoint}"
    return machines[node].start(line, *OVERRIDES, f"runs_dir={runs}", fault)


def await_fault(run: Path, fault: str) -> None:
    wait_for(fault, lambda: (run / ".injected").exists() and fault in (run / ".injected").read_text(), 120)


def read(path: Path) -> dict:
    return read_json(path) or {}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(max((run / "checkpoints").glob("step_*.pt")), weights_only=True)["model"]


def test_run_survives_a_lost_machine_and_resumes_after_a_preemption(tmp_path):
    runs, run = tmp_path / "runs", tmp_path / "runs" / "run"
    with two_machines(tmp_path) as machines:
        agents = [start_node(machines, node, runs) for node in (0, 1)]
        await_fault(run, "step=8")
        table = read(run / "status.json")["heartbeats"]
        assert os.readlink(table).startswith("/dev/shm/ddp_lab-")
        wait_for("the table without a name, which would remain of a lost node", lambda: "(deleted)" in os.readlink(table), 10)

        machines[1].connect("down")  # first, so that nobody is informed that its processes end
        agents[1].kill()
        lost = time.time()
        failure = wait_for("failure.json", lambda: read(run / "failure.json"), 60)
        assert (failure["kind"], failure["rank"], failure["host"]) == ("lost_node", 1, machines[1].name)
        assert failure["time"] - lost < REPORTED + BUSY
        machines[1].connect("up")
        agents[1] = start_node(machines, 1, runs)

        await_fault(run, "step=14")
        assert "started again after error: rank 1 on " + machines[1].name in (run / "train.log").read_text()
        for agent in agents:
            os.kill(agent.pid, signal.SIGTERM)
        outputs = [finish(agent, timeout=60) for agent in agents]
        assert read(run / "status.json")["status"] == "preempted", outputs

        outputs = [finish(agent, timeout=120) for agent in [start_node(machines, node, runs) for node in (0, 1)]]
        assert [code for code, _ in outputs] == [0, 0], outputs
    assert read(run / "status.json")["status"] == "finished"
    assert [line["epoch"] for line in read_metrics(run)] == list(range(1, EPOCHS + 1))
    code, output = launch("torchrun --standalone --nproc_per_node=2 train.py", *OVERRIDES, f"runs_dir={tmp_path / 'one'}")
    assert code == 0, output
    expected = weights(tmp_path / "one" / "run")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(run).items())
