"""Measure training loops side by side: train.py, stock torch, and the kernels alone.

python scripts/bench.py                             what our loop costs: `ours beside bare`
python scripts/bench.py --gpus 1 2 --models vit_l16 gpt2 resnet18 \\
    --strategies ddp fsdp scratch-bucketed pipeline "mesh tp=2" --json runs/bench.json
                                                    what a second GPU brings, beside stock torch
python scripts/bench.py --gpus 1 4 8 --models gpt2_tied --strategies fsdp "mesh shard=null tp=2" \\
    --json runs/bench.json --plan H100              what `ddp-lab advise` plans for these rows

The table has samples or, of gpt2, tokens per second of the training steps alone, on made-up
samples, `--batch` of them on each device: the median over the repeats of all rounds, and half the
range between the quartiles. In each round the loops of a strategy run one after another, so that
drift of the machine meets all of them. A launch that takes longer than `--patience` is ended. Every
launch is written to the JSON file when it ends; a call with the same file measures only what is
missing there, and `--minutes` ends a call in time, so that a long table can be measured in parts.
The ratio is that to the strongest loop that is not ours; bench_table.py describes the other
columns. A strategy whose layout does not fit a number of devices or a model is left out, with the
reason below the table. So is a stock loop that torch alone does not have, with the reason in it.

`--plan` measures nothing. It adds to the rows of our loops the peak memory that `ddp-lab advise`
plans, which needs no GPU, so that a later call on GPUs shows both.

stock                the loop of the strategy as an expert writes it (scripts/bench_stock.py)
stock float32 sums   the same of a Transformer that adds its blocks in float32, as most do
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
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.config.compose import quote  # noqa: E402
from ddp_lab.config.errors import ConfigError  # noqa: E402
from ddp_lab.launchers.short_run import run_in_time, train  # noqa: E402
from scripts.bench_layouts import (  # noqa: E402
    Layout,
    add_devices,
    config_of,
    lay_out,
    misfit,
    strategy_overrides,
)
from scripts.bench_loops import LOOPS  # noqa: E402
from scripts.bench_models import LR, MODELS  # noqa: E402
from scripts.bench_pairs import ratios  # noqa: E402
from scripts.bench_stock import USUAL_SUMS, why_no_stock_loop  # noqa: E402
from scripts.bench_table import is_same, table  # noqa: E402

FASTEST = ["cuda_graph=true", "compile=true", "channels_last=true", "precision=bf16"]
OURS = {
    "ours eager": ["speed=off"],
    "ours auto": [],
    "ours auto bf16": ["precision=bf16"],
    "ours": FASTEST,
}
PAIRED = "ours beside bare"
KEYS = ("model", "devices", "strategy", "loop", "batch")  # of a row: which one it is
NUMBERS = ("rates", "ratios", "cpu_ratios", "layout")  # of a row: what is not printed
PAIRS = 24  # epochs of a launch
NAMES = [*LOOPS, "stock", USUAL_SUMS, *OURS, PAIRED]


def overrides(model: str, ranks: int, arguments: argparse.Namespace) -> list[str]:
    """Return the overrides of train.py that all its loops have in common."""
    chosen = MODELS[model]
    batch = size_of_batch(model, arguments) * ranks
    usual = chosen.cpu_steps if arguments.gpus == [0] else chosen.steps
    steps = arguments.steps or usual
    return [
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


def line_of_ours(row: dict, arguments: argparse.Namespace) -> list[str]:
    """Return the overrides of train.py for a row of one of its loops, but for the device."""
    on_cpu = arguments.gpus == [0]
    options = ["compile=true"] if row["loop"] == "ours" and on_cpu else OURS[row["loop"]]
    return [
        *overrides(row["model"], row["devices"], arguments),
        *options,
        *strategy_overrides(row["strategy"]),
        f"epochs={arguments.repeats + 1}",
    ]


def device_of(arguments: argparse.Namespace) -> str:
    """Return the override of train.py for the devices."""
    return f"device={'cpu' if arguments.gpus == [0] else 'cuda'}"


def measure_ours(
    row: dict, arguments: argparse.Namespace, folder: Path
) -> tuple[list[float], int | None]:
    """Return samples or tokens per second of every repeat of a loop of train.py, and its memory.

    The memory is the peak in bytes of the rank that needs the most; None: it was not measured.
    Options that the run has disabled are noted in the row.

    Raises:
        RuntimeError: it took too long, or failed.
    """
    ranks = row["devices"]
    model = MODELS[row["model"]]
    line = [device_of(arguments), *line_of_ours(row, arguments)]
    if model.counts_memory:
        out = quote(str(folder / "peak"))
        line.append(f"callbacks=[{{_target_: scripts.bench_models.PeakMemory, out: {out}}}]")
    run = train(line, ranks if ranks > 1 else None, folder, "run", arguments.patience)
    if run.problem:
        raise RuntimeError(run.problem)
    printed = (folder / "run" / "run.output.txt").read_text()
    row["disabled"] = sorted(set(re.findall(r"(cuda_graph|compile)=true is disabled", printed)))
    peaks = [int(path.read_text()) for path in folder.glob("peak*")]
    return [rate * model.units for rate in run.rates], max(peaks, default=None)


def measure_stock(
    row: dict, arguments: argparse.Namespace, folder: Path
) -> tuple[list[float], int | None]:
    """Return samples or tokens per second of every repeat of a loop that is not ours, and its peak.

    It takes a quarter of the steps. The memory is as in `measure_ours`.

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
        "layout": row["layout"],
        "half": True,
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
    measured = json.loads(out.read_text())
    return measured["rates"], measured["peak"]


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
        device_of(arguments),
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


def measure(row: dict, arguments: argparse.Namespace) -> None:
    """Launch the loop of a row once more, and add its rates, or why there are none, to the row."""
    row["launches"] += 1
    rates_and_peak = measure_ours if row["loop"] in OURS else measure_stock
    with tempfile.TemporaryDirectory() as folder:
        try:
            if row["loop"] == PAIRED:
                measure_pairs(row, arguments, Path(folder))
            else:
                rates, peak = rates_and_peak(row, arguments, Path(folder))
                row["rates"] += rates
                if peak is not None:
                    row["peak"] = max(peak, row.get("peak", 0))
        except RuntimeError as error:
            row["skipped"] = str(error)
            return
    low, _, high = statistics.quantiles(row["rates"], n=4)
    row["rate"] = statistics.median(row["rates"])
    row["spread"] = (high - low) / 2 / row["rate"]


def plan(row: dict, arguments: argparse.Namespace) -> None:
    """Add to a row of our loops the peak memory in bytes that `ddp-lab advise` plans, or a note.

    It is that of the fullest device, as torch counts it.
    """
    from ddp_lab.advise.advisor import Advisor
    from ddp_lab.advise.devices import find_devices
    from ddp_lab.advise.plan import CannotPlan

    devices = find_devices(f"{row['devices']}x{arguments.plan}")
    try:
        advisor = Advisor.of(line_of_ours(row, arguments), None, devices)
        planned = advisor.plan(advisor.chosen or ["strategy=single"])
    except (ConfigError, CannotPlan) as error:
        print(f"no plan: {row['model']} {row['strategy']} on {row['devices']}: {error}", flush=True)
        return
    row["planned"] = round(planned.fullest.allocated)


def parse(gpus: int) -> argparse.Namespace:
    """Return the command line on a machine with so many GPUs; exit if it cannot be measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = {"type": int, "metavar": "N"}
    add_devices(parser, gpus)
    parser.add_argument("--models", nargs="+", default=["lenet", "resnet18"], choices=MODELS)
    parser.add_argument(
        "--strategies",
        nargs="+",
        help='on several devices, ddp by default; scratch-ALGORITHM, or with options: "mesh tp=2"',
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
        "--plan", metavar="CARD", help="plan the memory on this card, as of advise; measure nothing"
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
    if max(arguments.gpus) > gpus and not arguments.plan:
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
    return arguments


def rows_to_measure(arguments: argparse.Namespace) -> tuple[list[dict], list[str]]:
    """Return a row without rates for every loop, and what is left out, with the reasons.

    The loops of a strategy are consecutive.
    """
    counts = arguments.ranks if arguments.gpus == [0] else arguments.gpus
    strategies = arguments.strategies or ["ddp"]
    configs = {strategy: config_of(strategy) for strategy in ("single", *strategies)}
    rows: list[dict] = []
    left_out: list[str] = []
    for name, ranks in itertools.product(arguments.models, counts):
        with torch.device("meta"):
            model = MODELS[name].make()
        batch = size_of_batch(name, arguments)
        for strategy in ["single"] if ranks == 1 else strategies:
            try:
                layout = lay_out(configs[strategy], ranks, batch)
            except ConfigError as error:
                left_out.append(f"{name} on {ranks}, {strategy}: {error}")
                continue
            reason = misfit(layout, strategy, model)
            if reason is not None:
                left_out.append(f"{name} on {ranks}, {strategy}: {reason}")
                continue
            row = {"model": name, "devices": ranks, "strategy": strategy, "batch": batch}
            rows += rows_of(row, layout, arguments.loops)
    return rows, left_out


def rows_of(row: dict, layout: Layout, loops: list[str]) -> Iterator[dict]:
    """Yield a row for every loop of a strategy, with the reason of one that there is not."""
    strategy = row["strategy"]
    name = strategy.split()[0].partition("-")[0]
    for loop in loops:
        if loop in (*LOOPS, USUAL_SUMS, PAIRED) and strategy not in ("single", "ddp"):
            continue
        if loop == USUAL_SUMS and not MODELS[row["model"]].is_transformer:
            continue
        whole = row | {"loop": loop, "layout": layout._asdict(), "rates": [], "launches": 0}
        if layout.pp > 1:
            whole["bubble"] = layout.bubble
        reason = why_no_stock_loop(name, layout) if loop == "stock" else None
        if reason is not None:
            whole["skipped"] = reason
        yield whole


def resumed(rows: list[dict], before: list[dict]) -> list[dict]:
    """Return the rows with what an earlier call has measured, and after them its other rows.

    A row that could not be measured is tried again; what was planned for it remains.
    """
    measured = [old for old in before if "skipped" not in old]
    for row in rows:
        for old in before:
            if "planned" in old and is_same(old, row, *KEYS):
                row["planned"] = old["planned"]
    known = [row | next((old for old in measured if is_same(old, row, *KEYS)), {}) for row in rows]
    others = [old for old in before if not any(is_same(old, row, *KEYS) for row in rows)]
    return [*known, *others]


def late(begin: float, arguments: argparse.Namespace) -> bool:
    """Return whether a launch that begins now might end too late."""
    return time.monotonic() - begin + arguments.patience > 60 * arguments.minutes


def main() -> None:
    begin = time.monotonic()
    gpus = torch.cuda.device_count()
    arguments = parse(gpus)
    before = {"rows": []}
    if arguments.json and arguments.json.exists():
        before = json.loads(arguments.json.read_text())
    try:
        wanted, left_out = rows_to_measure(arguments)
    except ConfigError as error:
        sys.exit(f"error: --strategies: {error}")
    rows = resumed(wanted, before["rows"])
    record: dict[str, Any] = before
    if not arguments.plan:
        on_cpu = arguments.gpus == [0]
        record["where"] = f"{os.cpu_count()} CPU cores" if on_cpu else torch.cuda.get_device_name()
        record["torch"] = torch.__version__
        record["time"] = f"{datetime.now():%Y-%m-%d %H:%M}"
    record["rows"] = rows

    def write() -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(record, indent=1))

    if arguments.plan:
        for row in rows[: len(wanted)]:
            if row["loop"] in OURS and "planned" not in row:
                plan(row, arguments)
                write()
    else:
        for row in measured_in_turn(rows[: len(wanted)], begin, arguments):
            print({key: value for key, value in row.items() if key not in NUMBERS}, flush=True)
            write()
    if "where" in record:
        print(f"\n{record['where']}, torch {record['torch']}, {record['time']}")
    print(table([row for row in rows if row["launches"] or {"skipped", "planned"} & row.keys()]))
    for line in left_out:
        print(f"left out: {line}")


def measured_in_turn(
    rows: list[dict], begin: float, arguments: argparse.Namespace
) -> Iterator[dict]:
    """Measure the loops of each strategy one after another, and yield a row after each launch."""
    groups = itertools.groupby(rows, lambda row: [row[key] for key in KEYS[:3]])
    for group in [list(group) for _, group in groups]:
        for number, row in itertools.product(range(arguments.rounds), group):
            if row["launches"] > number or "skipped" in row or late(begin, arguments):
                continue
            measure(row, arguments)
            yield row


if __name__ == "__main__":
    main()
