"""Compare the losses of a training on 1, 2, 4 and 8 devices at the same global batch, by step.

python scripts/same_losses.py --gpus 1 2 4 8 --out runs/losses
python scripts/same_losses.py --gpus 0 --models gpt2 --steps 8 --out runs/losses-cpu -- \\
    model.depth=2 model.width=32 model.heads=2 data.context=32 batch_size=8 precision=float32

One device trains under `single`, several under each of `--strategies`. GPT-2 (tied, 1,024 tokens)
learns the bytes of this package's own Python files, and ResNet-18 the digits, with synchronised
BatchNorm; nothing is downloaded. Arguments after -- are Hydra overrides of train.py for all runs.

`--out` gets losses.json, losses.png with the curves, and table.md with the differences from the
loss of one device, relative to it: after five steps, at the end, and the largest of all. Sums in
another order round differently; training makes the differences grow.

Each run is written when it ends. A run that takes longer than `--patience` is ended, a call with
the same folder runs only what is missing or has failed, and `--minutes` ends a call in time.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.data.shard_writer import ByteEncoder, write_shards  # noqa: E402
from ddp_lab.launchers.short_run import train  # noqa: E402
from ddp_lab.observe.metrics_file import read_rows  # noqa: E402
from ddp_lab.observe.plot import Curve, Plot, beside, curves  # noqa: E402
from scripts.bench_layouts import add_devices, strategy_overrides  # noqa: E402
from scripts.bench_table import is_same  # noqa: E402

EARLY = 5  # steps after which losses still agree up to rounding
TEXT = "TEXT"  # stands for the folder of the shards of bytes
MODELS = {
    "gpt2": [
        *("model=gpt2", "model.tied=true", "task=tokens", "data=tokens"),
        *(f"data.root={TEXT}/train_*.bin", f"data.val_root={TEXT}/val_*.bin"),
        *("optimizer=adamw", "optimizer.lr=3e-4", "batch_size=32", "precision=bf16"),
    ],
    "resnet18": ["model=resnet18", "data=digits", "batch_size=256", "optimizer.lr=0.02"],
}
OF_RANKS = {"resnet18": ["strategy.batch_norm=sync"]}  # overrides where there are several
COMMON = [
    *("scheduler=constant", "log_every=1", "evaluate_test=end", "tracker=none"),
    "checkpoint.every_epochs=100000",
]
KEYS = ("model", "devices", "strategy", "steps", "overrides")  # of a row: which one it is
HEAD = (
    "model",
    "devices",
    "strategy",
    f"loss after {EARLY} steps",
    "difference",
    "loss at the end",
    "difference",
    "largest difference",
)


def write_text(folder: Path) -> None:
    """Write the bytes of the package's Python files to shards of tokens in a new folder."""
    text = folder.with_suffix(".txt")
    files = sorted((ROOT / "ddp_lab").rglob("*.py"))
    text.write_bytes(b"".join(file.read_bytes() for file in files))
    write_shards([text], folder, ByteEncoder(), val_fraction=0.05, largest=10**9)


def rows_to_run(arguments: argparse.Namespace) -> Iterator[dict]:
    """Yield a row without losses for each run."""
    counts = arguments.ranks if arguments.gpus == [0] else arguments.gpus
    for model, devices in itertools.product(arguments.models, counts):
        for strategy in ["single"] if devices == 1 else arguments.strategies:
            yield {
                "model": model,
                "devices": devices,
                "strategy": strategy,
                "steps": arguments.steps,
                "overrides": arguments.overrides,
            }


def measure(row: dict, arguments: argparse.Namespace) -> None:
    """Run train.py for a row, and add the loss of each step, or why there is none, to the row."""
    ranks = row["devices"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = folder / "shards"
        if row["model"] == "gpt2":
            write_text(shards)
        line = [
            f"device={'cpu' if arguments.gpus == [0] else 'cuda'}",
            *(each.replace(TEXT, str(shards)) for each in MODELS[row["model"]]),
            *COMMON,
            *strategy_overrides(row["strategy"]),
            *(OF_RANKS.get(row["model"], []) if ranks > 1 else []),
            f"max_steps={row['steps']}",
            *row["overrides"],
        ]
        line = [*{each.partition("=")[0]: each for each in line}.values()]  # the last one counts
        run = train(line, ranks if ranks > 1 else None, folder, "run", arguments.patience)
        if run.problem:
            row["skipped"] = run.problem
            return
        of_steps = [
            each
            for each in read_rows(folder / "run" / "metrics.jsonl")
            if each.get("kind") == "step"
        ]
    row["losses"] = {each["step"]: each["loss"] for each in of_steps}


def by_step(row: dict) -> dict[int, float]:
    """Return the losses of a row by step; JSON has made texts of the numbers of steps."""
    return {int(step): loss for step, loss in row["losses"].items()}


def differences(row: dict, rows: list[dict]) -> dict[int, float]:
    """Return the differences of the losses from those of one device, relative to them, by step.

    There are none without one device.
    """
    one = next((each for each in alike(row, rows) if each["devices"] == 1), None)
    if one is None:
        return {}
    expected = by_step(one)
    return {
        step: abs(loss - expected[step]) / abs(expected[step])
        for step, loss in by_step(row).items()
        if step in expected
    }


def alike(row: dict, rows: list[dict]) -> list[dict]:
    """Return the rows with losses of the same training on any number of devices."""
    return [
        each
        for each in rows
        if is_same(each, row, "model", "steps", "overrides") and "losses" in each
    ]


def table(rows: list[dict]) -> str:
    """Return the losses and their differences as a Markdown table."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for row in rows:
        cells = [row["model"], str(row["devices"]), row["strategy"]]
        if "losses" not in row:
            reason = f"not run: {row['skipped']}" if "skipped" in row else "not run"
            cells += [reason, "", "", "", ""]
        else:
            losses = by_step(row)
            apart = differences(row, rows)
            for step in (EARLY, max(losses)):
                cells.append(f"{losses[step]:.6f}" if step in losses else "")
                cells.append(f"{apart[step]:.1e}" if step in apart else "")
            cells.append(f"{max(apart.values()):.1e}" if apart else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plots(rows: list[dict]) -> list[Plot]:
    """Return two plots for each model: the losses by step, and the differences that are not 0."""
    drawn: list[Plot] = []
    for model in dict.fromkeys(row["model"] for row in rows if "losses" in row):
        losses: list[Curve] = []
        apart: list[Curve] = []
        for row in (row for row in rows if row["model"] == model and "losses" in row):
            label = f"{row['strategy']} on {row['devices']}"
            losses.append(Curve(label, list(by_step(row).items())))
            points = [(step, value) for step, value in differences(row, rows).items() if value]
            if points:
                apart.append(Curve(label, points))
        drawn.append(curves(f"{model}: loss", "step", "loss", losses))
        if apart:
            title = f"{model}: relative difference from one device"
            drawn.append(curves(title, "step", "difference", apart, log="y"))
    return drawn


def write_results(rows: list[dict], record: dict, out: Path) -> None:
    """Write the numbers, the table and the picture of all runs so far."""
    (out / "losses.json").write_text(json.dumps(record | {"rows": rows}, indent=1))
    (out / "table.md").write_text(f"{table(rows)}\n")
    if drawn := plots(rows):
        beside(drawn, out / "losses.png")


def parse(gpus: int) -> argparse.Namespace:
    """Return the command line on a machine with so many GPUs; exit if it cannot be run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = {"type": int, "metavar": "N"}
    add_devices(parser, gpus)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--strategies", nargs="+", default=["ddp"], help="on several devices")
    parser.add_argument("--steps", default=100, help="of each run", **number)
    parser.add_argument("--patience", default=180, help="seconds that a run may take", **number)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="no run begins that might end later"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of train.py, after --")
    arguments = parser.parse_intermixed_args()
    if max(arguments.gpus) > gpus:
        of_gpus = f"at most {gpus}, or " if gpus else ""
        sys.exit(
            f"error: --gpus {max(arguments.gpus)}: this machine shows {gpus}; use {of_gpus}0 for "
            "the CPU"
        )
    if arguments.steps < EARLY:
        sys.exit(f"error: --steps {arguments.steps}: must be at least {EARLY}")
    return arguments


def main() -> None:
    begin = time.monotonic()
    arguments = parse(torch.cuda.device_count())
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "losses.json"
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    done = [old for old in before if "losses" in old]
    wanted = list(rows_to_run(arguments))
    rows = [next((old for old in done if is_same(old, row, *KEYS)), row) for row in wanted]
    rows += [old for old in done if not any(is_same(old, row, *KEYS) for row in wanted)]
    on_cpu = arguments.gpus == [0]
    record = {
        "where": f"{os.cpu_count()} CPU cores" if on_cpu else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "time": f"{datetime.now():%Y-%m-%d %H:%M}",
    }
    for row in rows[: len(wanted)]:
        late = time.monotonic() - begin + arguments.patience > 60 * arguments.minutes
        if "losses" in row or late:
            continue
        print(f"{row['model']} on {row['devices']}, {row['strategy']}:", end=" ", flush=True)
        measure(row, arguments)
        write_results(rows, record, arguments.out)
    print(f"\n{record['where']}, torch {record['torch']}, {record['time']}\n{table(rows)}")


if __name__ == "__main__":
    main()
