"""Elastic restarts over two torchrun agents as two nodes, and a node that is lost and returns."""

import re
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from launches import SMALL, finish, launch, newest, only_run, read_metrics, start, wait_for

EPOCHS = 4
OVERRIDES = [*SMALL, "strategy=scratch", f"epochs={EPOCHS}", "checkpoint.every_steps=3"]
# an agent of torchrun itself that is started again cannot join
RESTARTABLE = "python -m ddp_lab train"


class Agents:
    """Two agents; the first opens the store.

    The second one has the first ranks, because its address comes first.

    Args:
        runs: the config's `runs_dir`.
        options: of torchrun.
        overrides: Hydra overrides.
        faults: `inject` on the ranks of each agent.
        ranks: number of ranks of each agent.
        program: what starts an agent.
    """

    def __init__(
        self,
        runs: Path,
        options: str,
        *overrides: str,
        faults: tuple[str, str],
        ranks: tuple[int, int] = (1, 1),
        program: str = "torchrun",
    ):
        self.runs = runs
        self.faults = faults
        self.ranks = ranks
        with socket.socket() as free:
            free.bind(("localhost", 0))
            endpoint = f"localhost:{free.getsockname()[1]}"
        self.line = (
            f"{program} {options} --rdzv-backend=c10d --rdzv-id=agents --rdzv-endpoint={endpoint}"
        )
        self.overrides = [*OVERRIDES, f"runs_dir={runs}", *overrides]
        self.processes = [self.start(0), self.start(1)]

    def start(self, agent: int) -> subprocess.Popen:
        line = (
            f"{self.line} --rdzv-conf=is_host={1 - agent},last_call_timeout=10 "
            f"--local-addr=127.0.0.{2 - agent}"
        )
        fault = [f"inject={self.faults[agent]}"] if self.faults[agent] else []
        script = "train.py" if line.startswith("torchrun") else ""
        return start(
            f"{line} --nproc_per_node={self.ranks[agent]} {script}", *self.overrides, *fault
        )

    def await_fault(self, agent: int) -> None:
        """Wait until a rank of this agent sleeps, because `slow` is injected."""

        def injected() -> bool:
            return any(
                self.faults[agent] in path.read_text() for path in self.runs.glob("*/.injected")
            )

        wait_for(self.faults[agent], injected, 120)

    def kill_second(self) -> None:
        """Kill the second agent, and its ranks with it."""
        self.processes[1].kill()
        self.processes[1].communicate(timeout=30)

    def finish(self) -> Path:
        """Assert that the agents succeed and that every epoch was recorded once, in one directory.

        Return the directory.
        """
        outputs = [finish(agent, timeout=120) for agent in self.processes]
        assert [code for code, _ in outputs] == [0, 0], outputs
        run = only_run(self.runs)
        assert [line["epoch"] for line in read_metrics(run)] == list(range(1, EPOCHS + 1))
        assert "started again after error" in (run / "train.log").read_text()
        return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, torch.Tensor]:
    runs = tmp_path_factory.mktemp("undisturbed")
    code, output = launch(
        "torchrun --standalone --nproc_per_node=2 train.py", *OVERRIDES, f"runs_dir={runs}"
    )
    assert code == 0, output
    return newest(only_run(runs))["model"]


@pytest.mark.slow
def test_rank_that_crashes_is_restarted_with_the_ranks_of_the_other_agent(tmp_path):
    """No variable is set by hand."""
    Agents(tmp_path, "--nnodes=2 --max-restarts=3", faults=("crash@rank=1,step=8", "")).finish()


@pytest.mark.slow
def test_run_continues_without_a_lost_node_and_takes_it_back(undisturbed, tmp_path):
    """With --nnodes=1:2.

    The lost node had rank 0, so the run directory is chosen on three nodes one after another.
    """
    faults = "slow@rank=0,step=14", "slow@rank=0,step=8"
    agents = Agents(tmp_path, "--nnodes=1:2 --max-restarts=3", faults=faults, program=RESTARTABLE)
    agents.await_fault(1)
    agents.kill_second()
    agents.await_fault(0)  # the remaining rank, which has resumed alone, is rank 0 now
    agents.processes[1] = agents.start(1)
    run = agents.finish()
    log = (run / "train.log").read_text()
    assert re.findall(r"(\d) ranks?, global batch", log) == ["2", "1", "2"], log
    for name, tensor in newest(run)["model"].items():
        torch.testing.assert_close(tensor, undisturbed[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_rest_of_the_nodes_whose_ranks_do_not_divide_the_batch_is_refused(tmp_path):
    options = {"faults": ("", "slow@rank=0,step=3"), "ranks": (2, 1), "program": RESTARTABLE}
    agents = Agents(tmp_path, "--nnodes=1:2 --max-restarts=1", "batch_size=27", **options)
    agents.await_fault(1)
    agents.kill_second()
    code, output = finish(agents.processes[0], timeout=120)
    assert code == 2, output
    assert (
        output.count(
            "error: batch_size=27: is the global batch and must be divisible by the 2 replicas"
        )
        == 1
    ), output
