"""The launches of the loops, each in a world of its own, with a time limit."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from benchmark.ours import ON_CPU, ON_GPU, overrides

from ddp_lab.observe.metrics_file import read_epochs

ROOT = Path(__file__).parents[2]
NUMBERS = ("batch", "steps", "repeats", "workers", "patience")  # arguments of a loop's ranks
PACKAGES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}  # by the first word of a loop's name


def launch(arguments: Namespace, ranks: int, script: list[str], folder: Path) -> str | None:
    """Run a world of ranks to its end. Return None, or the last error line of its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *script]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if arguments.gpus == [0]:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    log = folder / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(arguments.patience)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"not done within {arguments.patience} s"
    if code == 0:
        return None
    lines = [line for line in log.read_text().splitlines() if "Error" in line or "error" in line]
    return lines[-1].strip() if lines else f"exit code {code}"


def measure(arguments: Namespace, model: str, ranks: int, loop: str, strategy: str) -> dict:
    """Return one row of the table."""
    row = {"model": model, "devices": ranks, "loop": loop, "strategy": strategy, "batch": arguments.batch}
    missing = PACKAGES.get(loop.split()[0])
    if missing and find_spec(missing) is None:
        return row | {"skipped": f"{missing} is not installed"}
    if loop == "kernels" and arguments.gpus == [0]:
        return row | {"skipped": "CUDA graphs need a GPU"}
    if "inside" in loop and ranks == 1:
        return row | {"skipped": "nothing is inside of DistributedDataParallel on one device"}
    with tempfile.TemporaryDirectory() as name:
        run = run_ours if loop.startswith("ours") else run_other
        problem, rates = run(arguments, model, ranks, loop, strategy, Path(name))
    if problem or len(rates) < 2:
        return row | {"skipped": problem or "no epoch was measured"}
    low, _, high = statistics.quantiles(rates, n=4)
    middle = statistics.median(rates)
    return row | {"rate": middle, "spread": (high - low) / 2 / middle, "rates": rates}


def run_ours(
    arguments: Namespace, model: str, ranks: int, loop: str, strategy: str, folder: Path
) -> tuple[str | None, list[float]]:
    """Run train.py, and return what went wrong, and the rate of every epoch but the first."""
    performance = (ON_CPU if arguments.gpus == [0] else ON_GPU)[loop]
    more = [
        f"epochs={arguments.repeats + 1}",
        f"runs_dir={folder}",
        "name=run",
        "checkpoint.every_epochs=1000",
        f"timeout={arguments.patience}",  # compiling takes long, without progress
    ]
    script = ["train.py", *overrides(model, strategy, arguments, ranks, performance), *more]
    problem = launch(arguments, ranks, script, folder)
    return problem, [row["samples_per_second"] for row in read_epochs(folder / "run" / "metrics.jsonl")[1:]]


def run_other(
    arguments: Namespace, model: str, ranks: int, loop: str, strategy: str, folder: Path
) -> tuple[str | None, list[float]]:
    """Run a loop of bench.py itself, and return what went wrong, and the rates. It takes a quarter of the steps."""
    rates = folder / "rates"
    arguments = Namespace(**vars(arguments) | {"steps": max(5, arguments.steps // 4)})
    script = ["scripts/bench.py", "--loop", loop, "--strategy", strategy, "--models", model, "--json", str(rates)]
    script += [str(word) for key in NUMBERS for word in (f"--{key}", getattr(arguments, key))]
    problem = launch(arguments, ranks, [*script, "--gpus", "0" if arguments.gpus == [0] else "1"], folder)
    return problem, json.loads(rates.read_text()) if rates.exists() else []
