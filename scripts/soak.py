"""Soak test of elastic restarts: launches with a random fault at a random step must end like a run without one.

make soak                                      20 launches
python scripts/soak.py --launches 5 --seed 1

Each launch has two ranks. A random one of them is killed, segfaults or raises an exception. Prints one line per launch: the
fault, the exit code, and whether the final weights are bit-identical to those of the run without a fault. Exit code 1 if any
launch fails.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

OVERRIDES = ["data=synthetic", "data.dataset.train_size=480", "data.dataset.test_size=50", "model=simple_cnn", "batch_size=24"]
OVERRIDES += ["optimizer.lr=0.01", "epochs=3", "checkpoint.every_steps=5"]
STEPS = 60  # of the whole run


def train(runs_dir: str, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Launch a run of two ranks with up to three restarts."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    line = [torchrun, "--standalone", "--nproc_per_node=2", "--max-restarts=3", "train.py", "strategy=ddp"]
    return subprocess.run(
        [*line, *OVERRIDES, f"runs_dir={runs_dir}", f"name={name}", *more], capture_output=True, text=True, timeout=180
    )


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
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    chance = random.Random(arguments.seed)
    bad = 0
    with tempfile.TemporaryDirectory() as runs_dir:
        train(runs_dir, "no-fault")
        expected = weights(runs_dir, "no-fault")
        for launch in range(1, arguments.launches + 1):
            fault = (
                f"{chance.choice(['crash', 'segfault', 'raise'])}@rank={chance.randrange(2)},step={chance.randint(1, STEPS)}"
            )
            start = time.monotonic()
            done = train(runs_dir, f"run-{launch}", f"inject={fault}")
            try:
                same = all(torch.equal(tensor, expected[key]) for key, tensor in weights(runs_dir, f"run-{launch}").items())
            except OSError:
                same = False
            good = done.returncode == 0 and same
            bad += not good
            print(
                f"{launch:2} {fault:28} exit code {done.returncode}, same weights: {same}, {time.monotonic() - start:.0f} s",
                flush=True,
            )
            if not good:
                print(done.stdout[-2000:], done.stderr[-2000:])
    print(f"{arguments.launches - bad} of {arguments.launches} launches ended with the weights of the run without a fault")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
