"""Measure training loops side by side: train.py, stock torch, and the kernels alone.

python scripts/bench.py                                       what our loop costs: alternately with the bare loop
python scripts/bench.py --gpus 1 2 --loops all --json runs/bench.json                  a table of all loops

Without --loops, train.py with speed=off and `bare` alternate in one process, `--seconds` each with 1 and 2 threads on a CPU:
after every `--turn` steps of one come as many of the other. The ratio is the time of bare divided by ours, the median over all
pairs, beside its lower 95 % bound.

With --loops, the table has images per second of the training steps alone, on made-up images (28 x 28, for resnet50 224 x 224),
`--batch` of them on each device: the median of `--repeats`, and half the range between the quartiles. The loops run one after
another; one that takes longer than `--patience` is ended. The ratio is that to the strongest loop that is not ours.

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
import math
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
    data["train_size"] = arguments.batch * ranks * (arguments.steps if arguments.loops else 200)
    return [
        *(f"device={'cpu' if arguments.gpus == [0] else 'cuda'}", *chosen.overrides, "data=synthetic"),
        *(f"data.dataset.{key}={value}" for key, value in data.items()),
        *(f"batch_size={arguments.batch}", "scaling=weak", "evaluate_test=end", f"optimizer.lr={LR}", "scheduler=constant"),
        "checkpoint.every_epochs=100000",
    ]


def launch(command: list[str], arguments: argparse.Namespace, threads: int, out: Path) -> list:
    """Run a loop to its end, and return the numbers that it has written to `out`.

    Raises:
        RuntimeError: it took too long, or failed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=arguments.patience + arguments.seconds
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done within {arguments.patience} s") from None
    if done.returncode or not out.exists():
        errors = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "rror" in line]
        raise RuntimeError(errors[-1] if errors else f"exit code {done.returncode}")
    return json.loads(out.read_text())


def rates_of(model: str, ranks: int, loop: str, strategy: str, arguments: argparse.Namespace, folder: Path) -> list[float]:
    """Return images per second of every repeat of a loop. Loops that are not ours take a quarter of the steps."""
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    if loop in OURS:
        name, _, algorithm = strategy.partition("-")
        chosen = ["compile=true"] if loop == "ours" and arguments.gpus == [0] else OURS[loop]
        given = [*overrides(model, ranks, arguments), *chosen, f"strategy={name}", f"epochs={arguments.repeats + 1}"]
        given += [f"strategy.algorithm={algorithm}"] if algorithm else []
        done = train(given, ranks if ranks > 1 else None, folder, "run", arguments.patience)
        if done.problem:
            raise RuntimeError(done.problem)
        return done.rates
    settings = {"model": model, "loop": loop, "gpus": arguments.gpus != [0], "out": str(folder / "rates")}
    settings |= {"batch": arguments.batch, "repeats": arguments.repeats, "steps": max(5, arguments.steps // 4)}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *torchrun, "scripts/bench_loops.py", json.dumps(settings)]
    return launch(command, arguments, threads, folder / "rates")


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


def alternate(model: str, threads: int, arguments: argparse.Namespace) -> dict:
    """Return one row of the comparison of `ours eager` with `bare`, alternately."""
    row = {"model": model, "threads": threads, "batch": arguments.batch}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pairs"
        bench = {"model": model, "out": str(out)} | {
            key: getattr(arguments, key) for key in ("batch", "steps", "turn", "seconds")
        }
        quoted = json.dumps(bench).replace('"', '\\"')
        given = [
            *overrides(model, 1, arguments),
            "strategy=single",
            "speed=off",
            "epochs=100000",
            f"runs_dir={folder}",
            "name=run",
        ]
        given += ["optimizer._target_=scripts.bench_loops.Alternating", f'+optimizer.bench="{quoted}"']
        try:
            pairs = launch([sys.executable, "train.py", *given], arguments, threads, out)
        except RuntimeError as error:
            return row | {"skipped": str(error)}
    images = arguments.batch * arguments.turn
    rates = [images / statistics.median(seconds) for seconds in zip(*pairs, strict=True)]
    ratios = sorted(bare / ours for ours, bare in pairs)
    return row | {
        "pairs": len(pairs),
        "rates": rates,
        "ratio": statistics.median(ratios),
        "bound": ratios[rank_of_bound(len(ratios))],
    }


def rank_of_bound(n: int) -> int:
    """Return which of n sorted values is a lower bound of their median at 95 % confidence; 0 with fewer than 5 values.

    The true median is below the value of index k if at most k of n independent values are, which has the probability that a
    coin tossed n times shows at most k heads (the sign test). This holds for any distribution of the values.
    """
    below = itertools.accumulate(math.comb(n, k) / 2**n for k in range(n))
    return max(0, sum(1 for _ in itertools.takewhile(lambda p: p <= 0.05, below)) - 1)


def strongest(rows: list[dict], model: str, devices: int) -> float | None:
    """Return the highest rate of the loops that are not ours; None if there is none."""
    others = [row for row in rows if (row["model"], row["devices"]) == (model, devices) and row["loop"] not in OURS]
    return max((row["rate"] for row in others if "rate" in row), default=None)


def table(rows: list[dict]) -> str:
    """Return the rates of loops as a Markdown table, with the ratio to the strongest loop that is not ours."""
    lines = ["| model | devices | loop | strategy | images/s | +- | against the strongest other |", "|---" * 7 + "|"]
    for row in rows:
        head = f"| {row['model']} | {row['devices']} | {row['loop']} | {row['strategy']} |"
        best = strongest(rows, row["model"], row["devices"])
        times = f"{row['rate'] / best:.2f}x" if best and "rate" in row else ""
        rate = f"{row['rate']:,.0f} | {row['spread']:.1%} | {times}" if "rate" in row else f"not run: {row['skipped']} | |"
        lines.append(f"{head} {rate} |")
    return "\n".join(lines)


def turns_table(rows: list[dict]) -> str:
    """Return the comparison of `ours eager` with `bare` as a Markdown table."""
    lines = ["| model | threads | batch | pairs | bare, images/s | ours | ratio | at least |", "|---" * 8 + "|"]
    for row in rows:
        head = f"| {row['model']} | {row['threads']} | {row['batch']} |"
        if "skipped" in row:
            lines.append(f"{head} not run: {row['skipped']} | | | | |")
        else:
            ours, bare = row["rates"]
            lines.append(f"{head} {row['pairs']} | {bare:,.0f} | {ours:,.0f} | {row['ratio']:.3f} | {row['bound']:.3f} |")
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
    parser.add_argument("--turn", default=20 if gpus else 1, help="steps of each loop before the other's turn", **number)
    parser.add_argument("--threads", nargs="+", default=[1, 2], help="numbers of threads on a CPU", **number)
    parser.add_argument("--seconds", default=40, help="how long two loops alternate", **number)
    names = [*LOOPS, *OURS]
    parser.add_argument("--loops", nargs="+", default=[], choices=["all", *names], metavar="LOOP", help=", ".join(names))
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
    if arguments.loops:
        loops = [*LOOPS, *OURS] if "all" in arguments.loops else arguments.loops
        works = [
            (measure, model, ranks, loop, strategy, arguments)
            for model, ranks, loop in itertools.product(arguments.models, counts, loops)
            for strategy in (["ddp"] if loop in LOOPS else ["single"] if ranks == 1 else arguments.strategies)
        ]
    else:
        works = [
            (alternate, *case, arguments)
            for case in itertools.product(arguments.models, arguments.threads[: None if on_cpu else 1])
        ]
    for function, *values in works:
        rows.append(function(*values))
        print({key: value for key, value in rows[-1].items() if key != "rates"}, flush=True)
        if arguments.json:  # after every row, for a run that is ended early
            arguments.json.write_text(json.dumps(record, indent=1))
    print(f"\n{where}, torch {torch.__version__}, {record['time']}, batch {arguments.batch} on each device")
    print(table(rows) if arguments.loops else turns_table(rows))


if __name__ == "__main__":
    main()
