"""Twenty launches that each lose a random rank at a random step to a random fault, and must end as an undisturbed one.

make soak

Prints a line for each launch: the fault, the restarts, whether the weights are the same bits. Exit code 1 if any is not.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

WORDS = ["data=synthetic", "data.dataset.train_size=480", "data.dataset.test_size=50", "model=simple_cnn", "batch_size=24"]
WORDS += ["optimizer.lr=0.01", "epochs=3", "checkpoint.every_steps=5"]
STEPS = 60


def train(runs_dir: str, name: str, *more: str) -> subprocess.CompletedProcess:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    line = [torchrun, "--standalone", "--nproc_per_node=2", "--max-restarts=3", "train.py", "strategy=ddp"]
    return subprocess.run(
        [*line, *WORDS, f"runs_dir={runs_dir}", f"name={name}", *more], capture_output=True, text=True, timeout=180
    )


def weights(runs_dir: str, name: str) -> dict[str, torch.Tensor]:
    return torch.load(Path(runs_dir) / name / "checkpoints" / f"step_{STEPS:08d}.pt", weights_only=True)["model"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    chance = random.Random(arguments.seed)
    bad = 0
    with tempfile.TemporaryDirectory() as runs_dir:
        train(runs_dir, "undisturbed")
        expected = weights(runs_dir, "undisturbed")
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
                f"{launch:2} {fault:28} code {done.returncode}, same weights: {same}, {time.monotonic() - start:.0f} s",
                flush=True,
            )
            if not good:
                print(done.stdout[-2000:], done.stderr[-2000:])
    print(f"{arguments.launches - bad} of {arguments.launches} ended as the undisturbed one")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
