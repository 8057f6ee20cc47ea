"""Soak test of elastic restarts: launches with a random fault at a random step must end like a run without one.

make soak                                      20 launches of one agent, and 20 of two
python scripts/soak.py --launches 5 --seed 1 --agents 2

With one agent, each launch has two ranks, and one of them is killed, segfaults or raises an exception. Two agents are like two
nodes with two ranks each. There a rank is killed or frozen, both ranks of a node are killed, or an agent is killed and started
again, all equally often. Prints one line per launch: the fault, the exit codes, and whether the final weights are bit-identical
to those of the run without a fault. Exit code 1 if any launch fails.
"""

import argparse
import atexit
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import torch

OVERRIDES = ["data=synthetic", "data.dataset.train_size=480", "data.dataset.test_size=50", "model=simple_cnn", "batch_size=24"]
OVERRIDES += ["optimizer.lr=0.01", "epochs=3", "checkpoint.every_steps=5"]
STEPS = 60  # of the whole run
TORCHRUN = [str(Path(sys.executable).with_name("torchrun"))]
RESTARTABLE = [sys.executable, "-m", "ddp_lab", "train"]
RANK_FAULTS = ["crash", "segfault", "raise"]
NODE_FAULTS = ["rank killed", "rank frozen", "node killed", "agent killed"]
LIMIT = 300  # seconds of a launch


def start(options: list[str], runs_dir: str, name: str, *more: str, restartable: bool = False) -> subprocess.Popen[bytes]:
    """Start an agent with two ranks. `restartable`: agents that are started again later find it."""
    line = [*(RESTARTABLE if restartable else TORCHRUN), "--max-restarts=3", "--nproc_per_node=2", *options]
    line += [*([] if restartable else ["train.py"]), *OVERRIDES, f"runs_dir={runs_dir}", f"name={name}", *more]
    environment = os.environ | {"LOGLEVEL": "INFO"}
    with Path(runs_dir, f"{name}.txt").open("a") as output:
        agent = subprocess.Popen(line, env=environment, stdout=output, stderr=output)
    atexit.register(agent.kill)  # its ranks end with it
    return agent


def train_on_one_agent(runs_dir: str, name: str, fault: str | None, chance: random.Random) -> tuple[str, list[int], str]:
    """Train with a fault. Return the fault with its step, the agents' exit codes, and the stacks of agents that hang."""
    injected = f"{fault}@rank={chance.randrange(2)},step={chance.randint(1, STEPS)}"
    more = [f"inject={injected}"] if fault else []
    agent = start(["--standalone"], runs_dir, name, "strategy=ddp", *more)
    return injected, *finish([agent])


def train_on_two_agents(runs_dir: str, name: str, fault: str | None, chance: random.Random) -> tuple[str, list[int], str]:
    """Do the same on two agents."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=soak", f"--rdzv-endpoint=localhost:{port}"]
    options += ["--local-addr=localhost"]
    step = chance.randint(1, STEPS)
    # At this step the run waits for three seconds, in which the fault occurs. ddp on four ranks resumes up to rounding errors.
    more = ["strategy=scratch", "timeout=20", *([f"inject=slow@rank=0,step={step}"] if fault else [])]
    launch = partial(start, options, runs_dir, name, *more, restartable=fault == "agent killed")
    agents = [launch()]
    wait_for(lambda: answers(port))
    agents.append(launch())
    if fault:
        wait_for((Path(runs_dir) / name / ".injected").exists)
        disturb(fault, agents[1], chance)
    if fault == "agent killed":  # the second: the first one holds the store, without which no agent can restart
        agents[1].wait()
        agents[1] = launch()
    return f"{fault} at step {step}", *finish(agents)


def finish(agents: list[subprocess.Popen[bytes]]) -> tuple[list[int], str]:
    """Wait for agents, and kill those that hang. Return their exit codes and the stacks of those that hang."""
    deadline = time.monotonic() + LIMIT
    stacks = ""
    for agent in agents:
        try:
            agent.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            stacks += describe_hang(agent.pid)
    for agent in agents:  # only now: the end of one would let the others fail
        agent.kill()
    return [agent.wait() for agent in agents], stacks


def describe_hang(pid: int) -> str:
    """Return what an agent that hangs and its ranks do: their state, and their stacks if py-spy is installed."""
    agent = psutil.Process(pid)
    text = ""
    for process in [agent, *agent.children(recursive=True)]:
        text += f"\nprocess {process.pid}, {process.status()}: {' '.join(process.cmdline())[:200]}\n"
        if spy := shutil.which("py-spy", path=Path(sys.executable).parent):
            dump = [spy, "dump", "--nonblocking", "--pid", str(process.pid)]
            text += subprocess.run(dump, capture_output=True, text=True).stdout
    return text


def answers(port: int) -> bool:
    """Return whether a port of this machine accepts connections."""
    with socket.socket() as client:
        return client.connect_ex(("localhost", port)) == 0


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: it is not true after LIMIT seconds.
    """
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the launch did not get there within {LIMIT} s")
        time.sleep(0.05)


def disturb(fault: str, agent: subprocess.Popen[bytes], chance: random.Random) -> None:
    """Kill or freeze processes of an agent."""
    ranks = [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]
    one = [chance.choice(ranks)]
    victims = {"rank killed": one, "rank frozen": one, "node killed": ranks, "agent killed": [agent.pid]}[fault]
    for pid in victims:
        os.kill(pid, signal.SIGSTOP if fault == "rank frozen" else signal.SIGKILL)


def weights(runs_dir: str, name: str) -> dict[str, torch.Tensor]:
    """Load the weights of the last step's checkpoint.

    Raises:
        OSError: the run did not reach its last step.
    """
    return torch.load(Path(runs_dir) / name / "checkpoints" / f"step_{STEPS:08d}.pt", weights_only=True)["model"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=20, help="number of launches")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed of the faults; default: the time")
    parser.add_argument("--agents", type=int, default=1, choices=[1, 2], help="number of torchrun agents")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the agents are killed
    print(f"seed {arguments.seed}")
    train, faults = [(train_on_one_agent, RANK_FAULTS), (train_on_two_agents, NODE_FAULTS)][arguments.agents - 1]
    chance = random.Random(arguments.seed)
    bad = 0
    with tempfile.TemporaryDirectory() as runs_dir:
        train(runs_dir, "no-fault", None, chance)
        expected = weights(runs_dir, "no-fault")
        for launch in range(arguments.launches):
            if launch % len(faults) == 0:
                chance.shuffle(faults)
            begin = time.monotonic()
            fault, codes, stacks = train(runs_dir, f"run-{launch}", faults[launch % len(faults)], chance)
            try:
                same = all(torch.equal(tensor, expected[key]) for key, tensor in weights(runs_dir, f"run-{launch}").items())
            except OSError:
                same = False
            good = not any(codes) and same
            bad += not good
            print(f"{launch + 1:2} {fault:28} exit codes {codes}, same weights: {same}, {time.monotonic() - begin:.0f} s")
            if not good:
                print((Path(runs_dir) / f"run-{launch}.txt").read_text()[-20_000:], stacks)
            sys.stdout.flush()
    print(f"{arguments.launches - bad} of {arguments.launches} launches ended with the weights of the run without a fault")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
