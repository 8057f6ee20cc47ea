"""Measure training loops side by side: train.py, stock torch, and the kernels alone.

python scripts/bench.py                                                  what our loop costs: `bare` and `ours eager`
python scripts/bench.py --gpus 1 2 --loops all --json runs/bench.json    a table of all loops

The table has images per second of the training steps alone, on made-up images (28 x 28, for resnet50 224 x 224), `--batch` of
them on each device: the median of `--repeats`, and half the range between the quartiles. The loops run one after another; one
that takes longer than `--patience` is ended. The ratio is that to the strongest loop that is not ours.

stock eager          torch alone, as an expert writes it: images on the device, bf16, channels_last, fused SGD
stock overhead       the same after torch.compile(mode="reduce-overhead"), on several devices inside of DistributedDataParallel
bare                 hand-written, eager, float32, images on the device: only the kernels of `ours eager`
ours eager           train.py with speed=off
ours auto, ... bf16  train.py without options; with precision=bf16, too
ours                 train.py with cuda_graph, compile, channels_last and bf16 (on a CPU compile alone, in float32)
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.launchers.short_run import train  # noqa: E402
from scripts.bench_loops import CLASSES, LOOPS, LR, MODELS  # noqa: E402

FASTEST = ["cuda_graph=true", "compile=true", "channels_last=true", "precision=bf16"]
OURS = {"ours eager": ["speed=off"], "ours auto": [], "ours auto bf16": ["precision=bf16"], "ours": FASTEST}


def overrides(model: str, ranks: int, arguments: argparse.Namespace) -> list[str]:
    """Return the overrides of train.py that all its loops have in common."""
    chosen = MODELS[model]
    data = {"channels": chosen.channels, "image_size": chosen.size, "num_classes": CLASSES, "test_size": 64}
    data["train_size"] = arguments.batch * ranks * arguments.steps
    return [
        *(f"device={'cpu' if arguments.gpus == [0] else 'cuda'}", *chosen.overrides, "data=synthetic"),
        *(f"data.dataset.{key}={value}" for key, value in data.items()),
        *(f"batch_size={arguments.batch}", "scaling=weak", "evaluate_test=end", f"optimizer.lr={LR}", "scheduler=constant"),
        "checkpoint.every_epochs=100000",
    ]


def rates_of(model: str, ranks: int, loop: str, strategy: str, arguments: argparse.Namespace, folder: Path) -> list[float]:
    """Return images per second of every repeat of a loop. Loops that are not ours take a quarter of the steps.

    Raises:
        RuntimeError: it took too long, or failed.
    """
    if loop in OURS:
        name, _, algorithm = strategy.partition("-")
        chosen = ["compile=true"] if loop == "ours" and arguments.gpus == [0] else OURS[loop]
        given = [*overrides(model, ranks, arguments), *chosen, f"strategy={name}", f"epochs={arguments.repeats + 1}"]
        given += [f"strategy.algorithm={algorithm}"] if algorithm else []
        run = train(given, ranks if ranks > 1 else None, folder, "run", arguments.patience)
        if run.problem:
            raise RuntimeError(run.problem)
        return run.rates
    out = folder / "rates"
    settings = {"model": model, "loop": loop, "gpus": arguments.gpus != [0], "out": str(out)}
    settings |= {"batch": arguments.batch, "repeats": arguments.repeats, "steps": max(5, arguments.steps // 4)}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *torchrun, "scripts/bench_loops.py", json.dumps(settings)]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=arguments.patience)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done within {arguments.patience} s") from None
    if done.returncode or not out.exists():
        errors = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "rror" in line]
        raise RuntimeError(errors[-1] if errors else f"exit code {done.returncode}")
    return json.loads(out.read_text())


def measure(model: str, ranks: int, loop: str, strategy: str, arguments: argparse.Namespace) -> dict:
    """Return one row of the table of loops."""
    row = {"model": model, "devices": ranks, "loop": loop, "strategy": strategy, "batch": arguments.batch}
    with tempfile.TemporaryDirectory() as folder:
        try:
            rates = rates_of(model, ranks, loop, strategy, arguments, Path(folder))
        except RuntimeError as error:
            return row | {"skipped": str(error)}
    low, _, high = statistics.quantiles(rates, n=4)
    middle = statistics.median(rates)
    return row | {"rate": middle, "spread": (high - low) / 2 / middle, "rates": rates}


def table(rows: list[dict]) -> str:
    """Return the rates of loops as a Markdown table, with the ratio to the strongest loop that is not ours."""
    lines = ["| model | devices | loop | strategy | images/s | +- | against the strongest other |", "|---" * 7 + "|"]
    for row in rows:
        head = f"| {row['model']} | {row['devices']} | {row['loop']} | {row['strategy']} |"
        alike = [each for each in rows if all(each[key] == row[key] for key in ("model", "devices")) and "rate" in each]
        best = max((each["rate"] for each in alike if each["loop"] not in OURS), default=None)
        times = f"{row['rate'] / best:.2f}x" if best and "rate" in row else ""
        rate = f"{row['rate']:,.0f} | {row['spread']:.1%} | {times}" if "rate" in row else f"not run: {row['skipped']} | |"
        lines.append(f"{head} {rate} |")
    return "\n".join(lines)


def parse(gpus: int) -> argparse.Namespace:
    """Return the command line on a machine with so many GPUs; exit with a message if it cannot be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--gpus", nargs="+", default=[min(gpus, 1)], help="0: the CPU, with 1 and 2 ranks", **number)
    parser.add_argument("--models", nargs="+", default=["lenet", "resnet18"], choices=MODELS)
    parser.add_argument("--strategies", nargs="+", default=["ddp"], help="of ours on several devices; scratch-ALGORITHM")
    parser.add_argument("--batch", default=256 if gpus else 64, help="samples on each device", **number)
    parser.add_argument("--steps", default=235 if gpus else 20, help="per repeat of ours; others take a quarter", **number)
    parser.add_argument("--repeats", default=5, **number)
    parser.add_argument("--patience", default=180, help="seconds that a launch may take", **number)
    names = [*LOOPS, *OURS]
    usual = ["bare", "ours eager"]
    parser.add_argument("--loops", nargs="+", default=usual, choices=["all", *names], metavar="LOOP", help=", ".join(names))
    parser.add_argument("--json", type=Path, help="file for the numbers")
    arguments = parser.parse_args()
    if arguments.repeats < 2:
        sys.exit(f"error: --repeats {arguments.repeats}: must be at least 2, for the quartiles")
    if max(arguments.gpus) > gpus:
        allowed = f"at most {gpus}, or " * (gpus > 0) + "0 for the CPU"
        sys.exit(f"error: --gpus {max(arguments.gpus)}: this machine shows {gpus}; use {allowed}")
    return arguments


def main() -> None:
    gpus = torch.cuda.device_count()
    arguments = parse(gpus)
    on_cpu = arguments.gpus == [0]
    where = f"{os.cpu_count()} CPU cores" if on_cpu else torch.cuda.get_device_name()
    record = {"where": where, "torch": torch.__version__, "time": f"{datetime.now():%Y-%m-%d %H:%M}", "rows": (rows := [])}
    counts = [1, 2] if on_cpu else arguments.gpus
    loops = [*LOOPS, *OURS] if "all" in arguments.loops else arguments.loops
    for model, ranks, loop in itertools.product(arguments.models, counts, loops):
        for strategy in ["ddp"] if loop in LOOPS else ["single"] if ranks == 1 else arguments.strategies:
            rows.append(measure(model, ranks, loop, strategy, arguments))
            print({key: value for key, value in rows[-1].items() if key != "rates"}, flush=True)
            if arguments.json:  # after every row, for a run that is ended early
                arguments.json.write_text(json.dumps(record, indent=1))
    print(f"\n{where}, torch {torch.__version__}, {record['time']}, batch {arguments.batch} on each device")
    print(table(rows))


if __name__ == "__main__":
    main()
