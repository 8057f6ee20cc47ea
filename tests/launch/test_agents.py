"""Elastic restarts over two torchrun agents, which stand for two nodes. No variable is set by hand."""

import socket
import subprocess
from pathlib import Path

import pytest
import torch
from launches import SMALL, finish, launch, read_metrics, start
from slurm_cluster import wait_for

EPOCHS = 4
OVERRIDES = [*SMALL, "strategy=scratch", f"epochs={EPOCHS}", "checkpoint.every_steps=3", "name=run"]


def start_agents(runs: Path, *overrides: str) -> list[subprocess.Popen]:
    """Start two agents with a rank each. The first opens the store at which they meet."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = (
        f"--nnodes=2 --nproc_per_node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-id=agents --rdzv-endpoint=localhost:{port}"
    )
    line = f"torchrun {options} --local-addr=localhost train.py"
    first = start(line, *OVERRIDES, f"runs_dir={runs}", *overrides)
    wait_for("store", lambda: answers(port), 60)
    return [first, start(line, *OVERRIDES, f"runs_dir={runs}", *overrides)]


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("localhost", port)) == 0


def assert_finished(runs: Path, agents: list[subprocess.Popen]) -> None:
    """Assert that the agents succeed and that every epoch was recorded once, in one directory."""
    outputs = [finish(agent, timeout=120) for agent in agents]
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert [path.name for path in runs.iterdir()] == ["run"]
    assert [line["epoch"] for line in read_metrics(runs / "run")] == list(range(1, EPOCHS + 1))
    assert "started again after error" in (runs / "run" / "train.log").read_text()


def weights(runs: Path) -> dict[str, torch.Tensor]:
    return torch.load(max((runs / "run" / "checkpoints").glob("step_*.pt")), weights_only=True)["model"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, torch.Tensor]:
    runs = tmp_path_factory.mktemp("undisturbed")
    code, output = launch("torchrun --standalone --nproc_per_node=2 train.py", *OVERRIDES, f"runs_dir={runs}")
    assert code == 0, output
    return weights(runs)


def test_rank_that_crashes_is_restarted_with_the_ranks_of_the_other_agent(tmp_path):
    assert_finished(tmp_path, start_agents(tmp_path, "inject=crash@rank=1,step=8"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_restart_over_two_agents_ends_with_the_same_weights(rank, undisturbed, tmp_path):
    assert_finished(tmp_path, start_agents(tmp_path, f"inject=crash@rank={rank},step=8"))
    assert all(torch.equal(tensor, undisturbed[name]) for name, tensor in weights(tmp_path).items())
