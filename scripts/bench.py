"""Measure training loops side by side: train.py, stock torch, and the kernels alone.

python scripts/bench.py                             what our loop costs: `ours beside bare`
python scripts/bench.py --gpus 1 2 --models vit_l16 gpt2 resnet18 \\
    --strategies ddp fsdp scratch-bucketed pipeline "mesh tp=2" --json runs/bench.json
                                                    what a second GPU brings, beside stock torch

The table has samples or, of gpt2, tokens per second of the training steps alone, on made-up
samples, `--batch` of them on each device: the median over the repeats of all rounds, and half the
range between the quartiles. In each round the loops of a strategy run one after another, so that
drift of the machine meets all of them. A launch that takes longer than `--patience` is ended. Every
launch is written to the JSON file when it ends; a call with the same file measures only what is
missing there, and `--minutes` ends a call in time, so that a long table can be measured in parts.
The ratio is that to the strongest loop that is not ours.

stock                the loop of the strategy as an expert writes it (scripts/bench_stock.py)
stock eager          torch alone: images on the device, bf16, channels_last, fused SGD
stock overhead       the same after torch.compile(mode="reduce-overhead"), on several devices inside
                     of DistributedDataParallel
ours beside bare     `ours eager` and `bare` alternate within one run, on a CPU (bench_pairs.py)
bare                 hand-written, eager, float32, images on the device: only the kernels of
                     `ours eager`
ours eager           train.py with speed=off
ours auto, ... bf16  train.py without options; with precision=bf16, too
ours                 train.py with cuda_graph, compile, channels_last and bf16 (on a CPU compile
                     alone, in float32)
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.launchers.short_run import run_in_time, train  # noqa: E402
from scripts.bench_loops import LOOPS  # noqa: E402
from scripts.bench_models import LR, MODELS  # noqa: E402
from scripts.bench_pairs import lower_bound, ratios  # noqa: E402
from scripts.bench_stock import STOCK  # noqa: E402

FASTEST = ["cuda_graph=true", "compile=true", "channels_last=true", "precision=bf16"]
OURS = {
    "ours eager": ["speed=off"],
    "ours auto": [],
    "ours auto bf16": ["precision=bf16"],
    "ours": FASTEST,
}
PAIRED = "ours beside bare"
NUMBERS = ("rates", "ratios", "cpu_ratios")  # of a row
PAIRS = 24  # epochs of a launch
NAMES = [*LOOPS, "stock", *OURS, PAIRED]


def strategy_overrides(strategy: str) -> list[str]:
    """Return the overrides of a strategy as in `--strategies`, such as "ddp" or "mesh tp=2"."""
    first, *options = strategy.split()
    name, _, algorithm = first.partition("-")
    chosen = [f"strategy={name}", *(f"strategy.{option}" for option in options)]
    if algorithm:
        chosen.append(f"strategy.algorithm={algorithm}")
    return chosen


def overrides(model: str, ranks: int, arguments: argparse.Namespace) -> list[str]:
    """Return the overrides of train.py that all its loops have in common."""
    chosen = MODELS[model]
    batch = size_of_batch(model, arguments) * ranks
    usual = chosen.cpu_steps if arguments.gpus == [0] else chosen.steps
    steps = arguments.steps or usual
    return [
        f"device={'cpu' if arguments.gpus == [0] else 'cuda'}",
        *chosen.overrides,
        *chosen.data(batch * steps),
        f"batch_size={batch}",
        "evaluate_test=end",
        f"optimizer.lr={LR}",
        "scheduler=constant",
        "tracker=none",
        "checkpoint.every_epochs=100000",
    ]


def size_of_batch(model: str, arguments: argparse.Namespace) -> int:
    """Return the number of samples on each device."""
    if arguments.batch:
        return arguments.batch
    return MODELS[model].cpu_batch if arguments.gpus == [0] else MODELS[model].batch


def rates_of_ours(row: dict, arguments: argparse.Namespace, folder: Path) -> list[float]:
    """Return samples or tokens per second of every repeat of a loop of train.py.

    Raises:
        RuntimeError: it took too long, or failed.
    """
    on_cpu = arguments.gpus == [0]
    options = ["compile=true"] if row["loop"] == "ours" and on_cpu else OURS[row["loop"]]
    ranks = row["devices"]
    line = [
        *overrides(row["model"], ranks, arguments),
        *options,
        *strategy_overrides(row["strategy"]),
        f"epochs={arguments.repeats + 1}",
    ]
    run = train(line, ranks if ranks > 1 else None, folder, "run", arguments.patience)
    if run.problem:
        raise RuntimeError(run.problem)
    return [rate * MODELS[row["model"]].units for rate in run.rates]


def rates_of_stock(row: dict, arguments: argparse.Namespace, folder: Path) -> list[float]:
    """Return samples or tokens per second of every repeat of a loop that is not ours.

    It takes a quarter of the steps.

    Raises:
        RuntimeError: it took too long, or failed.
    """
    out = folder / "rates"
    ranks = row["devices"]
    model = MODELS[row["model"]]
    steps = arguments.steps or (model.cpu_steps if arguments.gpus == [0] else model.steps)
    settings = {
        "model": row["model"],
        "loop": row["loop"],
        "strategy": row["strategy"].split()[0].partition("-")[0],
        "gpus": arguments.gpus != [0],
        "batch": size_of_batch(row["model"], arguments),
        "repeats": arguments.repeats,
        "steps": max(5, steps // 4),
        "out": str(out),
    }
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [
        sys.executable,
        *(torchrun if ranks > 1 else []),
        "scripts/bench_loops.py",
        json.dumps(settings),
    ]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    try:
        code, printed = run_in_time(command, environment, arguments.patience, ROOT)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done within {arguments.patience} s") from None
    if code or not out.exists():
        errors = [line.strip() for line in printed.splitlines() if "rror" in line]
        raise RuntimeError(errors[-1] if errors else f"exit code {code}")
    return json.loads(out.read_text())


def measure_pairs(row: dict, arguments: argparse.Namespace, folder: Path) -> None:
    """Add to the row the ratios of one run whose epochs alternate with bare steps, by (CPU) time.

    Raises:
        RuntimeError: it took too long, or failed.
    """
    model = row["model"]
    ranks = row["devices"]
    steps = arguments.steps or MODELS[model].cpu_steps
    out = folder / "pairs"
    task = {"model": model, "batch": row["batch"], "steps": steps, "out": out}
    line = [
        *overrides(model, ranks, arguments),
        "speed=off",
        *strategy_overrides(row["strategy"]),
        "task._target_=scripts.bench_pairs.BesideBare",
        *(f"+task.{key}={value}" for key, value in task.items()),
        f"epochs={PAIRS}",
    ]
    run = train(line, ranks if ranks > 1 else None, folder, "run", arguments.patience)
    if run.problem:
        raise RuntimeError(run.problem)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for clock, name in enumerate(("ratios", "cpu_ratios")):
        row[name] = row.get(name, []) + ratios(rows, clock)
    row["rates"] += [rate * MODELS[model].units for rate in run.rates]


def describe_pairs(row: dict) -> str:
    """Return the median of the ratios of a row and their lower 95 % bounds."""
    shown = []
    for name, clock in (("ratios", "time"), ("cpu_ratios", "CPU time")):
        median = statistics.median(row[name])
        shown.append(f"{median:.3f}, at least {lower_bound(row[name]):.3f}, by {clock}")
    return f"{'; '.join(shown)} ({len(row['ratios'])} pairs)"


def measure(row: dict, arguments: argparse.Namespace) -> None:
    """Launch the loop of a row once more, and add its rates, or why there are none, to the row."""
    row["launches"] += 1
    rates_of = rates_of_ours if row["loop"] in OURS else rates_of_stock
    with tempfile.TemporaryDirectory() as folder:
        try:
            if row["loop"] == PAIRED:
                measure_pairs(row, arguments, Path(folder))
            else:
                row["rates"] += rates_of(row, arguments, Path(folder))
        except RuntimeError as error:
            row["skipped"] = str(error)
            return
    low, _, high = statistics.quantiles(row["rates"], n=4)
    row["rate"] = statistics.median(row["rates"])
    row["spread"] = (high - low) / 2 / row["rate"]


def table(rows: list[dict]) -> str:
    """Return the rates as a Markdown table.

    `of one` is the rate in multiples of that of the same model on one device, by the loop `ours` or
    by another of ours; the last column the ratio to the strongest loop that is not ours, of the
    same strategy.
    """
    head = [
        "model",
        "devices",
        "strategy",
        "loop",
        "per second",
        "+-",
        "of one",
        "against the strongest other",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [row["model"], str(row["devices"]), row["strategy"], row["loop"]]
        if "rate" not in row:
            lines.append(f"| {' | '.join(cells)} | not run: {row['skipped']} | | | |")
            continue
        alike = [each for each in rows if is_same(each, row, "model", "devices") and "rate" in each]
        others = [each for each in alike if each["loop"] not in (*OURS, PAIRED)]
        same = [each for each in others if each["strategy"] == row["strategy"]]
        best = max((each["rate"] for each in same or others), default=None)
        alone = [
            each for each in rows if is_same(each, row, "model", "loop") and each["devices"] == 1
        ]
        one = next((each["rate"] for each in alone if "rate" in each), None)
        times = f"{row['rate'] / one:.2f}x" if one else ""
        ratio = f"{row['rate'] / best:.2f}x" if best else ""
        if row["loop"] == PAIRED:
            ratio = describe_pairs(row)
        lines.append(
            f"| {' | '.join(cells)} | {row['rate']:,.0f} | {row['spread']:.1%} | {times} | {ratio} "
            "|"
        )
    return "\n".join(lines)


def is_same(one: dict, other: dict, *keys: str) -> bool:
    """Return whether two rows have the same values of some keys."""
    return all(one[key] == other[key] for key in keys)


def parse(gpus: int) -> argparse.Namespace:
    """Return the command line on a machine with so many GPUs; exit if it cannot be measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = {"type": int, "metavar": "N"}
    parser.add_argument(
        "--gpus", nargs="+", default=[min(gpus, 1)], help="0: the CPU, with 1 and 2 ranks", **number
    )
    parser.add_argument("--models", nargs="+", default=["lenet", "resnet18"], choices=MODELS)
    parser.add_argument(
        "--strategies", nargs="+", help="on several devices, ddp by default; scratch-ALGORITHM"
    )
    parser.add_argument("--batch", help="samples on each device; by default the model's", **number)
    parser.add_argument("--steps", help="per repeat of ours; others take a quarter", **number)
    parser.add_argument("--repeats", default=5, help="of a launch", **number)
    parser.add_argument("--rounds", default=1, help="launches of each loop", **number)
    parser.add_argument("--patience", default=180, help="seconds that a launch may take", **number)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="no launch begins that might end later"
    )
    parser.add_argument(
        "--loops", nargs="+", choices=["all", *NAMES], metavar="LOOP", help=", ".join(NAMES)
    )
    parser.add_argument(
        "--json", type=Path, help="file for the numbers, which may have some of them"
    )
    arguments = parser.parse_args()
    if arguments.repeats < 2:
        sys.exit(f"error: --repeats {arguments.repeats}: must be at least 2, for the quartiles")
    if max(arguments.gpus) > gpus:
        of_gpus = f"at most {gpus}, or " if gpus else ""
        allowed = f"{of_gpus}0 for the CPU"
        sys.exit(f"error: --gpus {max(arguments.gpus)}: this machine shows {gpus}; use {allowed}")
    if arguments.loops is None:
        arguments.loops = ["ours", "stock"] if arguments.strategies else [PAIRED]
    elif "all" in arguments.loops:
        arguments.loops = NAMES
    if PAIRED in arguments.loops and arguments.gpus != [0]:
        arguments.loops = [loop for loop in arguments.loops if loop != PAIRED] or [
            "bare",
            "ours eager",
        ]
    for strategy in arguments.strategies or ():
        name = strategy.split()[0].partition("-")[0]
        if "stock" in arguments.loops and name not in STOCK:
            sys.exit(
                f"error: --strategies {strategy}: has no stock loop; use {', '.join(STOCK)}, or "
                "--loops ours"
            )
    return arguments


def rows_to_measure(arguments: argparse.Namespace) -> Iterator[dict]:
    """Yield a row without rates for every loop, those of a strategy consecutively."""
    counts = [1, 2] if arguments.gpus == [0] else arguments.gpus
    for model, ranks in itertools.product(arguments.models, counts):
        for strategy in ["single"] if ranks == 1 else arguments.strategies or ["ddp"]:
            for loop in arguments.loops:
                if loop in (*LOOPS, PAIRED) and strategy not in ("single", "ddp"):
                    continue
                row = {"model": model, "devices": ranks, "strategy": strategy, "loop": loop}
                yield row | {"batch": size_of_batch(model, arguments), "rates": [], "launches": 0}


def resumed(rows: list[dict], before: list[dict]) -> list[dict]:
    """Return the rows with what an earlier call has measured, and after them its other rows.

    A row that could not be measured is tried again.
    """
    keys = ("model", "devices", "strategy", "loop", "batch")
    measured = [old for old in before if "skipped" not in old]
    known = [next((old for old in measured if is_same(old, row, *keys)), row) for row in rows]
    others = [old for old in before if not any(is_same(old, row, *keys) for row in rows)]
    return [*known, *others]


def main() -> None:
    begin = time.monotonic()
    gpus = torch.cuda.device_count()
    arguments = parse(gpus)
    where = f"{os.cpu_count()} CPU cores" if arguments.gpus == [0] else torch.cuda.get_device_name()
    record = {
        "where": where,
        "torch": torch.__version__,
        "time": f"{datetime.now():%Y-%m-%d %H:%M}",
    }
    before = (
        json.loads(arguments.json.read_text())
        if arguments.json and arguments.json.exists()
        else {"rows": []}
    )
    wanted = list(rows_to_measure(arguments))
    rows = resumed(wanted, before["rows"])
    record["rows"] = rows
    groups = [
        list(group)
        for _, group in itertools.groupby(rows[: len(wanted)], lambda row: list(row.values())[:3])
    ]
    for group in groups:
        for number, row in itertools.product(range(arguments.rounds), group):
            late = time.monotonic() - begin + arguments.patience > 60 * arguments.minutes
            if row["launches"] > number or "skipped" in row or late:
                continue
            measure(row, arguments)
            print({key: value for key, value in row.items() if key not in NUMBERS}, flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(record, indent=1))
    print(f"\n{where}, torch {torch.__version__}, {record['time']}")
    print(table([row for row in rows if row["launches"]]))


if __name__ == "__main__":
    main()
