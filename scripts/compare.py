"""Trains the same model on the same batches under every strategy that this machine can run, and reports side by side.

python scripts/compare.py                                    LeNet on the digits, on the GPUs that are there or two CPU ranks
python scripts/compare.py --ranks 4 model=resnet18 data=fashion_mnist epochs=3 batch_size=1024

Words are train.py's own and hold for all strategies: the same seed, so the same first weights; the same GLOBAL batch, so the
same samples in every step. `--out` gets a run directory for each strategy (`tensorboard --logdir OUT` shows them side by side),
report.md, report.html, which needs no network, and the plots.

speed-up      samples a second against `single`; efficiency: that by the number of devices
difference    of the weights from `single`'s, the largest: after the first epoch, and at the end. Sums of float32 in another
              order round otherwise, and training makes that grow; models with BatchNorm differ by more (docs/strategies.md)
"""

import argparse
import base64
import html
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.launch.sweep import quote  # noqa: E402
from ddp_lab.launch.torchrun import world_command  # noqa: E402
from ddp_lab.plot import Curve, bars, beside, curves  # noqa: E402
from ddp_lab.rundir import read_json  # noqa: E402

COLUMNS = (
    "strategy",
    "devices",
    "s/epoch",
    "samples/s",
    "speed-up",
    "efficiency",
    "test accuracy",
    "difference after epoch 1",
    "difference at the end",
)


class Entry(NamedTuple):
    """A strategy to run: `ranks` None in one process; `why_not` what this machine lacks for it."""

    name: str
    words: list[str]
    ranks: int | None
    devices: int
    why_not: str | None = None


def entries(ranks: int, gpus: int) -> list[Entry]:
    pairs = None if ranks % 2 == 0 else f"{ranks} ranks make no pairs"
    fours = None if ranks >= 4 and ranks % 2 == 0 else "needs four ranks: two pipelines of two"
    one = "cuda:0" if gpus else "cpu"
    return [
        Entry("single", [f"device={one}"], None, 1),
        Entry("scratch", [], ranks, ranks),
        Entry("ddp", [], ranks, ranks),
        Entry("fsdp", [], ranks, ranks),
        Entry("dp", [], None, max(1, gpus), None if gpus else "is one replica without GPUs"),
        Entry("split", [], None, max(2, gpus) if gpus else 1, "needs two GPUs" if gpus == 1 else None),
        Entry("pipeline", [], ranks, ranks),
        Entry("ddp_pipeline", ["strategy.pp=2"], ranks, ranks, fours),
        Entry("tp", ["strategy.tp=2"], ranks, ranks, pairs),
    ]


class Result(NamedTuple):
    entry: Entry
    records: list[dict]
    weights: list[dict[str, torch.Tensor]]  # after the first epoch, and at the end
    problem: str | None

    @property
    def seconds(self) -> float:
        """Of an epoch: the median; the first one, which allocates and tunes, counts only where it is alone."""
        return statistics.median(record["seconds"] for record in self.records[1:] or self.records)

    @property
    def rate(self) -> float:
        return statistics.median(record["samples_per_second"] for record in self.records[1:] or self.records)

    def difference(self, other: "Result", when: int) -> float:
        mine, others = self.weights[when], other.weights[when]
        return max((mine[name].double() - others[name].double()).abs().max().item() for name in others)


def run(entry: Entry, words: list[str], out: Path) -> Result:
    if entry.why_not:
        return Result(entry, [], [], entry.why_not)
    run_dir = out / entry.name
    given = [*words, f"strategy={entry.name}", *entry.words, f"runs_dir={quote(str(out))}", f"name={entry.name}"]
    given += ["checkpoint.every_epochs=1", "checkpoint.keep=100000"]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    start = time.perf_counter()
    print(f"{entry.name} ...", end=" ", flush=True)
    command = world_command(given, entry.ranks)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"{time.perf_counter() - start:.0f} s", flush=True)
    (run_dir if run_dir.exists() else out).joinpath(f"{entry.name}.output.txt").write_text(done.stdout)
    if done.returncode:
        failure = read_json(run_dir / "failure.json")
        said = [line.strip() for line in done.stdout.splitlines() if "error: " in line]
        reason = failure["message"] if failure else said[-1] if said else f"exit code {done.returncode}"
        return Result(entry, [], [], reason.splitlines()[0].partition("error: ")[2] or reason)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    files = sorted((run_dir / "checkpoints").glob("step_*.pt"), key=lambda path: (len(path.name), path.name))
    weights = [torch.load(path, weights_only=True)["model"] for path in (files[0], files[-1])]
    return Result(entry, records, weights, None)


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    """The table's cells, in words."""
    single = results[0]
    table = []
    for result in results:
        entry = result.entry
        if result.problem:
            table.append((entry.name, "", f"not run: {result.problem}", *[""] * (len(COLUMNS) - 3)))
            continue
        speed_up = result.rate / single.rate if not single.problem else float("nan")
        differences = ("", "") if single.problem else tuple(f"{result.difference(single, when):.1e}" for when in (0, 1))
        table.append(
            (
                entry.name,
                str(entry.devices),
                f"{result.seconds:.2f}",
                f"{result.rate:,.0f}",
                f"{speed_up:.2f}",
                f"{speed_up / entry.devices:.0%}",
                f"{result.records[-1]['test_accuracy']:.4f}",
                *differences,
            )
        )
    return table


def draw(results: list[Result], path: Path) -> None:
    ran = [result for result in results if not result.problem]
    by_epoch, by_time = [], []
    for result in ran:
        accuracy = [record["test_accuracy"] for record in result.records]
        clock = [sum(record["seconds"] for record in result.records[: i + 1]) for i in range(len(accuracy))]
        by_epoch.append(Curve(result.entry.name, [(record["epoch"], record["test_accuracy"]) for record in result.records]))
        by_time.append(Curve(result.entry.name, list(zip(clock, accuracy, strict=True))))
    plots = [
        curves("Test accuracy by epoch: one curve", "epoch", "accuracy", by_epoch),
        curves("and by seconds of training", "s", "accuracy", by_time),
        bars("Samples a second", "samples/s", {result.entry.name: result.rate for result in ran}),
        bars("of which each device's", "samples/s", {result.entry.name: result.rate / result.entry.devices for result in ran}),
    ]
    beside(plots, path)


def report(table: list[tuple[str, ...]], head: list[str], out: Path) -> str:
    """Writes report.md and report.html; returns the first."""
    text = "\n".join(
        [
            "# Every strategy on the same work",
            "",
            *head,
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|---" * len(COLUMNS) + "|",
            *("| " + " | ".join(row) + " |" for row in table),
            "",
            "![accuracy and speed](plots.png)",
            "",
        ]
    )
    (out / "report.md").write_text(text)
    picture = base64.b64encode((out / "plots.png").read_bytes()).decode()
    cells = "".join(
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in [("th", COLUMNS), *(("td", row) for row in table)]
    )
    style = "body{font:15px sans-serif;margin:2em;max-width:80em}td,th{padding:.3em .8em;text-align:right}"
    style += "td{border-top:1px solid #ddd}td:first-child,th:first-child{text-align:left}img{max-width:100%}"
    (out / "report.html").write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Every strategy on the same work</title><style>{style}</style>"
        f"<h1>Every strategy on the same work</h1>{''.join(f'<p>{html.escape(line)}</p>' for line in head)}"
        f"<table>{cells}</table><p><img alt='accuracy and speed' src='data:image/png;base64,{picture}'></p></html>"
    )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = torch.cuda.device_count()
    parser.add_argument("--ranks", type=int, default=max(2, gpus), help="of the strategies of several processes")
    parser.add_argument("--strategies", nargs="+", help="some of them; single always runs")
    parser.add_argument("--out", type=Path, default=None, help="else runs/compare-<time>")
    parser.add_argument("words", nargs="*", help="of train.py, for all strategies")
    arguments = parser.parse_intermixed_args()
    chosen = [
        entry
        for entry in entries(arguments.ranks, gpus)
        if not arguments.strategies or entry.name in ("single", *arguments.strategies)
    ]
    if unknown := set(arguments.strategies or ()) - {entry.name for entry in chosen}:
        names = ", ".join(entry.name for entry in entries(arguments.ranks, gpus))
        parser.error(f"--strategies {' '.join(sorted(unknown))}: there is no such strategy; allowed: {names}")
    for word in arguments.words:
        if word.partition("=")[0] in ("runs_dir", "name", "strategy"):
            parser.error(f"{word}: is compare.py's own to choose; see --out and --strategies")
    out = (arguments.out or ROOT / "runs" / f"compare-{datetime.now():%Y%m%d-%H%M%S}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    words = arguments.words or ["epochs=6", "scheduler=constant"]
    results = [run(entry, words, out) for entry in chosen]
    if all(result.problem for result in results):
        sys.exit(f"error: nothing ran: {results[0].problem}")
    draw(results, out / "plots.png")
    where = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"{os.cpu_count()} CPU cores"
    some = f" --strategies {' '.join(arguments.strategies)} --" if arguments.strategies else ""
    head = [
        f"python scripts/compare.py --ranks {arguments.ranks}{some} {shlex.join(words)}",
        f"{where}, torch {torch.__version__}, Python {platform.python_version()}, {datetime.now():%Y-%m-%d %H:%M}",
    ]
    print("\n" + report(rows(results), head, out))
    print(f"{out}/report.html   tensorboard --logdir {out}")


if __name__ == "__main__":
    main()
