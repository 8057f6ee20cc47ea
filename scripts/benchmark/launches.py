"""The launches of the loops, each in a world of its own, with a time limit."""

import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMBERS = ("batch", "steps", "repeats", "workers", "patience", "turn", "seconds")  # arguments of a loop's ranks
PACKAGES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}  # by the first word of a loop's name


def launch(arguments: Namespace, row: dict, folder: Path) -> str | None:
    """Run one loop of bench.py in a world of ranks to its end. Return None, or the last error line of its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={row['devices']}"]
    command += ["scripts/bench.py", "--loop", row["loop"], "--strategy", row["strategy"], "--models", row["model"]]
    command += [str(word) for key in NUMBERS for word in (f"--{key}", getattr(arguments, key))]
    command += ["--gpus", "0" if arguments.gpus == [0] else "1", "--json", str(folder / "measured")]
    environment = os.environ | {"OMP_NUM_THREADS": str(row.get("threads") or os.environ.get("OMP_NUM_THREADS", "1"))}
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


def run(arguments: Namespace, row: dict) -> tuple[str | None, list]:
    """Run one loop, and return what went wrong, and what it measured."""
    with tempfile.TemporaryDirectory() as name:
        problem, measured = launch(arguments, row, Path(name)), Path(name) / "measured"
        return problem, json.loads(measured.read_text()) if measured.exists() else []


def measure(arguments: Namespace, model: str, ranks: int, loop: str, strategy: str) -> dict:
    """Return one row of the table. Loops that are not ours take a quarter of the steps."""
    row = {"model": model, "devices": ranks, "loop": loop, "strategy": strategy, "batch": arguments.batch}
    missing = PACKAGES.get(loop.split()[0])
    if missing and find_spec(missing) is None:
        return row | {"skipped": f"{missing} is not installed"}
    if loop == "kernels" and arguments.gpus == [0]:
        return row | {"skipped": "CUDA graphs need a GPU"}
    if "inside" in loop and ranks == 1:
        return row | {"skipped": "nothing is inside of DistributedDataParallel on one device"}
    steps = arguments.steps if loop.startswith("ours") else max(5, arguments.steps // 4)
    problem, rates = run(Namespace(**vars(arguments) | {"steps": steps}), row)
    if problem or len(rates) < 2:
        return row | {"skipped": problem or "no epoch was measured"}
    low, _, high = statistics.quantiles(rates, n=4)
    middle = statistics.median(rates)
    return row | {"rate": middle, "spread": (high - low) / 2 / middle, "rates": rates}


def compare(arguments: Namespace, model: str, ranks: int, threads: int) -> dict:
    """Return one row of the comparison of `ours eager` with `bare` in turns."""
    strategy = "single" if ranks == 1 else arguments.strategies[0]
    row = {
        "model": model,
        "devices": ranks,
        "threads": threads,
        "loop": "turns",
        "strategy": strategy,
        "batch": arguments.batch,
    }
    problem, pairs = run(arguments, row)
    if problem or not pairs:
        return row | {"skipped": problem or "no turn was measured: raise --seconds"}
    samples = arguments.batch * ranks * arguments.turn
    rates = [samples / statistics.median(seconds) for seconds in list(zip(*pairs, strict=True))[:2]]
    ratios = [sorted(bare / ours for ours, bare in pair) for pair in ([p[:2] for p in pairs], [p[2:] for p in pairs])]
    return row | {
        "pairs": len(pairs),
        "rates": rates,
        "ratios": [(statistics.median(of), of[rank_of_bound(len(of))]) for of in ratios],
    }


def rank_of_bound(n: int) -> int:
    """Return which of n sorted values is a lower bound of their median at 95 % confidence; 0 with fewer than 5 values.

    The true median is below the value of index k if at most k of n independent values are, which has the probability that a
    coin tossed n times shows at most k heads. This holds for any distribution of the values.
    """
    below = itertools.accumulate(math.comb(n, k) / 2**n for k in range(n))
    return max(0, sum(1 for _ in itertools.takewhile(lambda p: p <= 0.05, below)) - 1)
