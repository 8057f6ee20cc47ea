"""Train the same model on the same batches under every strategy that this machine can run, and compare them in a report.

python scripts/compare.py                                    LeNet on the digits, on all available GPUs or two CPU ranks
python scripts/compare.py --ranks 2 4 -- model=resnet18 data=fashion_mnist epochs=3 batch_size=1024

Arguments after -- are Hydra overrides of train.py and apply to all strategies. All have the same seed, hence the same initial
weights, and the same GLOBAL batch, hence the same samples in every step. `--out` gets a run directory per strategy
(`tensorboard --logdir OUT` compares them), report.md, report.html (self-contained) and the plots. With GPUs, the report
also has what `python -m ddp_lab.advise` predicts for them, beside what was measured; `--gpus 2xH100` predicts for others.

speed-up      throughput divided by that of `single`; efficiency: the speed-up divided by the number of devices
memory        peak memory allocated on one device; without GPUs, peak resident size of one process, PyTorch included
sent          bytes per step that a rank passes to collectives and sends
time split    where the time of a step goes, mean over devices: see ddp_lab/observe/time_split.py. Ten steps of the first epoch
              are recorded for it (profile=true), which is slower. The throughput therefore excludes the first epoch, and the
              plot by seconds shows it with the median time of the later epochs, if there are any
difference    largest difference of any weight from that of `single`, after the first epoch and at the end. Sums of float32 in
              another order round differently, and training makes the difference grow; models with BatchNorm differ by more
              (docs/strategies.md)
"""

import argparse
import base64
import html
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.launch.command_line import REFUSED  # noqa: E402
from ddp_lab.launch.sweep import quote  # noqa: E402
from ddp_lab.launch.torchrun import new_folder, world_command  # noqa: E402
from ddp_lab.observe.axes import short  # noqa: E402
from ddp_lab.observe.plot import Curve, bars, beside, curves, stacked  # noqa: E402
from ddp_lab.observe.profiler import mean_split  # noqa: E402
from ddp_lab.resilience.run_directory import read_json  # noqa: E402
from scripts.predicted import Comparison, comparison_table, predict  # noqa: E402

COLUMNS = (
    "strategy",
    "devices",
    "s/epoch",
    "samples/s",
    "speed-up",
    "efficiency",
    "memory a device",
    "sent a step",
    "test accuracy",
    "difference after epoch 1",
    "difference at the end",
)


NOTES = (
    "difference: the largest difference of any weight from single's. Sums in another order round differently, and training "
    "makes that grow: the longer the run and the larger its learning rate, the more. Under BatchNorm each rank normalises its "
    "local batch, which is a different function. docs/strategies.md explains both; the tests require 1e-6.",
    "throughput: the median of the epochs after the first, in which steps are profiled; for a run of one epoch, that epoch.",
    "memory: peak memory allocated on one GPU; without GPUs, peak resident size of one process, PyTorch included.",
)


class Entry(NamedTuple):
    """A strategy to run.

    Attributes:
        name: name of the strategy.
        overrides: Hydra overrides that it needs.
        ranks: number of processes; None runs train.py without torchrun.
        devices: number of devices it uses.
        why_not: why it cannot run on this machine; None if it can.
    """

    name: str
    overrides: list[str]
    ranks: int | None
    devices: int
    why_not: str | None = None

    @property
    def label(self) -> str:
        """The name of the strategy's directory, bar and curve."""
        return self.name if self.ranks is None else f"{self.name}-{self.ranks}"


def entries(counts: list[int], gpus: int) -> list[Entry]:
    """Return all strategies; those of several processes once for each number of ranks."""
    one = "cuda:0" if gpus else "cpu"
    alone = [
        Entry("single", [f"device={one}"], None, 1),
        Entry("dp", [], None, max(1, gpus), None if gpus else "without GPUs it has only one replica"),
        Entry("split", [], None, max(2, gpus) if gpus else 1, "needs two GPUs" if gpus == 1 else None),
    ]
    return alone[:1] + [entry for ranks in counts for entry in of_ranks(ranks)] + alone[1:]


def of_ranks(ranks: int) -> list[Entry]:
    """Return the strategies of several processes for one number of ranks."""
    pairs = None if ranks % 2 == 0 else f"needs an even number of ranks, got {ranks}"
    fours = None if ranks >= 4 and ranks % 2 == 0 else f"needs an even number of at least 4 ranks, got {ranks}"
    plain = [Entry(name, [], ranks, ranks) for name in ("scratch", "ddp", "fsdp", "pipeline")]
    return [
        *plain,
        Entry("ddp_pipeline", ["strategy.pp=2"], ranks, ranks, fours),
        Entry("tp", ["strategy.tp=2"], ranks, ranks, pairs),
    ]


class Result(NamedTuple):
    """The outcome of one strategy: its records of metrics.jsonl and its weights, or the problem that kept it from running."""

    entry: Entry
    records: list[dict[str, Any]]
    weights: list[dict[str, torch.Tensor]]  # after the first epoch, and at the end
    problem: str | None
    profile: dict[str, Any] | None = None
    refused: bool = False  # train.py ended with a config error

    @property
    def name(self) -> str:
        return self.entry.label

    @property
    def seconds(self) -> float:
        """Median seconds of an epoch. The first epoch, which allocates and tunes, counts only if it is the only one."""
        return statistics.median(record["seconds"] for record in self.records[1:] or self.records)

    @property
    def rate(self) -> float:
        """Median samples per second, without the first epoch unless it is the only one."""
        return statistics.median(record["samples_per_second"] for record in self.records[1:] or self.records)

    def difference(self, other: "Result", when: int) -> float:
        """Return the largest absolute difference of a weight, after the first epoch (`when` 0) or at the end (1)."""
        mine, others = self.weights[when], other.weights[when]
        weights = [
            name for name, tensor in others.items() if tensor.is_floating_point()
        ]  # without BatchNorm's num_batches_tracked
        return max((mine[name].double() - others[name].double()).abs().max().item() for name in weights)


def run(entry: Entry, overrides: list[str], out: Path) -> Result:
    """Run train.py under one strategy and read what it wrote."""
    if entry.why_not:
        return Result(entry, [], [], entry.why_not)
    run_dir = out / entry.label
    given = [*overrides, f"strategy={entry.name}", *entry.overrides, f"runs_dir={quote(str(out))}", f"name={entry.label}"]
    given += ["checkpoint.every_epochs=1", "checkpoint.keep=100000"]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    start = time.perf_counter()
    print(f"{entry.label} ...", end=" ", flush=True)
    command = world_command(given, entry.ranks)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"{time.perf_counter() - start:.0f} s", flush=True)
    (run_dir if run_dir.exists() else out).joinpath(f"{entry.label}.output.txt").write_text(done.stdout)
    if done.returncode:
        failure = read_json(run_dir / "failure.json")
        errors = [line.strip() for line in done.stdout.splitlines() if "error: " in line]
        reason = failure["message"] if failure else errors[-1] if errors else f"exit code {done.returncode}"
        problem = reason.splitlines()[0].partition("error: ")[2] or reason
        return Result(entry, [], [], problem, refused=done.returncode == REFUSED)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    files = sorted((run_dir / "checkpoints").glob("step_*.pt"), key=lambda path: (len(path.name), path.name))
    weights = [torch.load(path, weights_only=True)["model"] for path in (files[0], files[-1])]
    return Result(entry, records, weights, None, read_json(run_dir / "profile" / "summary.json"))


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    """Return the cells of the table as text. The row of a strategy that did not run ends with the reason."""
    single = results[0]
    table: list[tuple[str, ...]] = []
    for result in results:
        entry = result.entry
        if result.problem:
            table.append((entry.name, str(entry.devices), f"not run: {result.problem}"))
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
                *used(result.profile),
                f"{result.records[-1]['test_accuracy']:.4f}",
                *differences,
            )
        )
    return table


def used(profile: dict[str, Any] | None) -> tuple[str, str]:
    """Return peak memory and bytes sent per step as text; empty without a profile."""
    if profile is None:
        return "", ""
    sent = profile["bytes_per_step"]
    return (
        f"{max(profile['peak_memory_bytes']) / 2**20:,.0f} MiB",
        "not measured" if None in sent else f"{short(float(f'{max(sent):.3g}'))}B",
    )


def predictions(results: list[Result], overrides: list[str], gpus: str) -> list[str]:
    """Return a Markdown table of predicted and measured values of the strategies that ran."""
    comparisons: list[Comparison] = []
    for entry, rate, profile in ((result.entry, result.rate, result.profile) for result in results if not result.problem):
        memory, predicted = predict(entry.name, entry.overrides, entry.ranks, entry.devices, overrides, gpus)
        measured = max(profile["peak_memory_bytes"]) if profile else None
        comparisons.append(Comparison(entry.name, entry.devices, (memory, measured), (predicted, rate)))
    return [
        "",
        f"Predicted for {gpus}, and measured:" if gpus != "here" else "Predicted and measured:",
        "",
        *comparison_table(comparisons),
    ]


def draw(results: list[Result], path: Path) -> None:
    """Draw accuracy, throughput, scaling and time split of the strategies that ran."""
    ran = [result for result in results if not result.problem]
    by_epoch: list[Curve] = []
    by_time: list[Curve] = []
    for result in ran:
        accuracy = [record["test_accuracy"] for record in result.records]
        clock = itertools.accumulate([result.seconds, *(record["seconds"] for record in result.records[1:])])
        by_epoch.append(Curve(result.name, [(record["epoch"], record["test_accuracy"]) for record in result.records]))
        by_time.append(Curve(result.name, list(zip(clock, accuracy, strict=True))))
    plots = [
        curves("Test accuracy by epoch: the curves coincide", "epoch", "accuracy", by_epoch),
        curves("Test accuracy by seconds of training", "s", "accuracy", by_time),
        bars("Throughput", "samples/s", {result.name: result.rate for result in ran}),
        curves("Throughput by devices", "devices", "samples/s", scaling(ran), zero=True),
    ]
    split = {result.name: mean_split(result.profile) for result in ran if result.profile}
    plots += [stacked("Where a step's time goes", "ms", split)] if split else []
    beside(plots, path)


def scaling(ran: list[Result]) -> list[Curve]:
    """Return throughput by devices: a line from single's point for each strategy of several processes, and the ideal line."""
    start = [(1, result.rate) for result in ran if result.name == "single"]
    most = max(result.entry.devices for result in ran)
    lines = [Curve("ideal", [(1, start[0][1]), (most, most * start[0][1])], dashed=True)] if start and most > 1 else []
    for name in dict.fromkeys(result.entry.name for result in ran if result.entry.ranks is not None):
        lines.append(Curve(name, start + [(r.entry.devices, r.rate) for r in ran if r.entry.name == name]))
    return lines or [Curve("single", start or [(result.entry.devices, result.rate) for result in ran])]


def diagnoses(results: list[Result]) -> list[str]:
    """Return the diagnosis of each profiled run as one line."""
    return [f"{result.name}: {'. '.join(result.profile['diagnosis'])}" for result in results if result.profile]


def html_row(tag: str, row: Sequence[str]) -> str:
    """Return a row of an HTML table. If the row has too few cells, the last one spans the missing columns."""
    *cells, last = (f">{html.escape(cell)}</{tag}>" for cell in row)
    missing = len(COLUMNS) - len(row)
    wide = f" colspan={missing + 1} style='text-align:left'" if missing else ""
    return f"<tr>{''.join(f'<{tag}{cell}' for cell in cells)}<{tag}{wide}{last}</tr>"


def report(table: list[tuple[str, ...]], head: list[str], diagnosis: list[str], predicted: list[str], out: Path) -> str:
    """Write report.md and report.html.

    Args:
        table: the cells of the table, without the header.
        head: lines above the table.
        diagnosis: lines below the table.
        predicted: lines of `predictions`; [] without GPUs.
        out: directory of the report and of plots.png.

    Returns:
        The text of report.md.
    """
    text = "\n".join(
        [
            "# Every strategy on the same work",
            "",
            *head,
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|---" * len(COLUMNS) + "|",
            *("| " + " | ".join([*row, *[""] * (len(COLUMNS) - len(row))]) + " |" for row in table),
            "",
            *(f"- {line}" for line in diagnosis),
            *predicted,
            "",
            *(f"*{note}*\n" for note in NOTES),
            "![accuracy and speed](plots.png)",
            "",
        ]
    )
    (out / "report.md").write_text(text)
    below = "\n".join(predicted)
    picture = base64.b64encode((out / "plots.png").read_bytes()).decode()
    cells = "".join(html_row(tag, row) for tag, row in [("th", COLUMNS), *(("td", row) for row in table)])
    style = "body{font:15px sans-serif;margin:2em;max-width:80em}td,th{padding:.3em .8em;text-align:right}"
    style += "td{border-top:1px solid #ddd}td:first-child,th:first-child{text-align:left}img{max-width:100%}"
    (out / "report.html").write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Every strategy on the same work</title><style>{style}</style>"
        f"<h1>Every strategy on the same work</h1>{''.join(f'<p>{html.escape(line)}</p>' for line in head)}"
        f"<table>{cells}</table><ul>{''.join(f'<li>{html.escape(line)}' for line in diagnosis)}</ul>"
        f"<pre>{html.escape(below)}</pre>"
        f"{''.join(f'<p><i>{html.escape(note)}</i></p>' for note in NOTES)}"
        f"<p><img alt='accuracy and speed' src='data:image/png;base64,{picture}'></p></html>"
    )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = 0 if "device=cpu" in sys.argv else torch.cuda.device_count()
    powers = [2**power for power in range(1, 10) if 2**power <= gpus]
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=powers or [2], help="numbers of ranks for the strategies of several processes"
    )
    parser.add_argument("--strategies", nargs="+", help="strategies to run; single always runs")
    parser.add_argument("--out", type=Path, default=None, help="directory of the report; default: runs/compare-<time>")
    parser.add_argument("--gpus", default="here" if gpus else None, help="GPUs to predict for, as in ddp_lab.advise")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of train.py, for all strategies")
    arguments = parser.parse_intermixed_args()
    if min(arguments.ranks) < 1:
        parser.error(f"--ranks {' '.join(map(str, arguments.ranks))}: each must be at least 1")
    chosen = [
        entry
        for entry in entries(arguments.ranks, gpus)
        if not arguments.strategies or entry.name in ("single", *arguments.strategies)
    ]
    if unknown := set(arguments.strategies or ()) - {entry.name for entry in chosen}:
        names = ", ".join(dict.fromkeys(entry.name for entry in entries(arguments.ranks, gpus)))
        given = " ".join(sorted(unknown))
        parser.error(f"--strategies {given}: no such strategy; allowed: {names}. Put overrides of train.py after --")
    for override in arguments.overrides:
        if override.partition("=")[0] in ("runs_dir", "name", "strategy"):
            parser.error(f"{override}: is set by compare.py; use --out and --strategies")
    out = new_folder(arguments.out or ROOT / "runs" / f"compare-{datetime.now():%Y%m%d-%H%M%S}")
    # The default has so few steps that rounding differences stay small.
    overrides = arguments.overrides or ["epochs=4", "model.init_std=null", "optimizer.lr=0.03"]
    results = [run(chosen[0], [*overrides, "profile=true"], out)]
    profile = ["profile=true"]
    if results[0].refused:
        again = run(chosen[0], overrides, out)
        if not again.refused:  # profile=true was refused: the run is too short or the device is not supported
            print(f"without profiles: {results[0].problem}")
            profile, results = [], [again]
    results += [run(entry, overrides + profile, out) for entry in chosen[1:]]
    if all(result.problem for result in results):
        sys.exit(f"error: nothing ran: {results[0].problem}")
    draw(results, out / "plots.png")
    where = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"{os.cpu_count()} CPU cores"
    some = f" --strategies {' '.join(arguments.strategies)}" if arguments.strategies else ""
    head = [
        f"python scripts/compare.py --ranks {' '.join(map(str, arguments.ranks))}{some} -- {shlex.join(overrides)}",
        f"{where}, torch {torch.__version__}, Python {platform.python_version()}, {datetime.now():%Y-%m-%d %H:%M}",
    ]
    predicted = predictions(results, overrides, arguments.gpus) if arguments.gpus else []
    print("\n" + report(rows(results), head, diagnoses(results), predicted, out))
    print(f"{out}/report.html   tensorboard --logdir {out}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
