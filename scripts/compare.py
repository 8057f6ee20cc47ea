"""Trains the same model on the same batches under every strategy that this machine can run, and reports side by side.

python scripts/compare.py                                    LeNet on the digits, on the GPUs that are there or two CPU ranks
python scripts/compare.py --ranks 2 4 -- model=resnet18 data=fashion_mnist epochs=3 batch_size=1024

Words are train.py's own and hold for all strategies: the same seed, so the same first weights; the same GLOBAL batch, so the
same samples in every step. `--out` gets a run directory for each strategy (`tensorboard --logdir OUT` shows them side by side),
report.md, report.html, which needs no network, and the plots.

speed-up      samples a second against `single`; efficiency: that by the number of devices
memory        the most that one device had allocated; without GPUs, what one process had resident, PyTorch itself included
sent          what a rank hands to collectives and sends in a step
time split    of a step, the mean over devices: see ddp_lab/observe/time_split.py. Ten steps of the first epoch are
              recorded for it (profile=true); so for speed and clock that epoch counts as the median of the others, where
              there are others
difference    of the weights from `single`'s, the largest: after the first epoch, and at the end. Sums of float32 in another
              order round otherwise, and training makes that grow; models with BatchNorm differ by more (docs/strategies.md)
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
from typing import NamedTuple

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.launch.command_line import REFUSED  # noqa: E402
from ddp_lab.launch.sweep import quote  # noqa: E402
from ddp_lab.launch.torchrun import new_folder, world_command  # noqa: E402
from ddp_lab.observe.plot import Curve, bars, beside, curves, short, stacked  # noqa: E402
from ddp_lab.observe.profiler import mean_split  # noqa: E402
from ddp_lab.resilience.run_directory import read_json  # noqa: E402

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
    "difference: the largest of any weight from single's. Sums in another order round otherwise, and training makes that grow: "
    "the longer the run and the larger its learning rate, the more. Under BatchNorm each rank normalises its own share of a "
    "batch, which is another function. docs/strategies.md has both, and the tests ask for 1e-6.",
    "speed: the median of the epochs behind the first, in which steps are profiled; of a run of one epoch, that one.",
    "memory: allocated on one GPU; without GPUs what one process had resident, PyTorch itself included.",
)


class Entry(NamedTuple):
    """A strategy to run: `ranks` None in one process; `why_not` what this machine lacks for it."""

    name: str
    words: list[str]
    ranks: int | None
    devices: int
    why_not: str | None = None

    @property
    def label(self) -> str:
        """Names its directory, its bar and its curve."""
        return self.name if self.ranks is None else f"{self.name}-{self.ranks}"


def entries(counts: list[int], gpus: int) -> list[Entry]:
    """All strategies, those of several processes with each count of ranks."""
    one = "cuda:0" if gpus else "cpu"
    alone = [
        Entry("single", [f"device={one}"], None, 1),
        Entry("dp", [], None, max(1, gpus), None if gpus else "is one replica without GPUs"),
        Entry("split", [], None, max(2, gpus) if gpus else 1, "needs two GPUs" if gpus == 1 else None),
    ]
    return alone[:1] + [entry for ranks in counts for entry in of_ranks(ranks)] + alone[1:]


def of_ranks(ranks: int) -> list[Entry]:
    pairs = None if ranks % 2 == 0 else f"{ranks} ranks make no pairs"
    fours = None if ranks >= 4 and ranks % 2 == 0 else "needs four ranks: two pipelines of two"
    plain = [Entry(name, [], ranks, ranks) for name in ("scratch", "ddp", "fsdp", "pipeline")]
    return [
        *plain,
        Entry("ddp_pipeline", ["strategy.pp=2"], ranks, ranks, fours),
        Entry("tp", ["strategy.tp=2"], ranks, ranks, pairs),
    ]


class Result(NamedTuple):
    entry: Entry
    records: list[dict]
    weights: list[dict[str, torch.Tensor]]  # after the first epoch, and at the end
    problem: str | None
    profile: dict | None = None
    refused: bool = False  # train.py took the words for the user's mistake

    @property
    def name(self) -> str:
        return self.entry.label

    @property
    def seconds(self) -> float:
        """Of an epoch: the median; the first one, which allocates and tunes, counts only where it is alone."""
        return statistics.median(record["seconds"] for record in self.records[1:] or self.records)

    @property
    def rate(self) -> float:
        return statistics.median(record["samples_per_second"] for record in self.records[1:] or self.records)

    def difference(self, other: "Result", when: int) -> float:
        mine, others = self.weights[when], other.weights[when]
        weights = [name for name, tensor in others.items() if tensor.is_floating_point()]  # not BatchNorm's counts of batches
        return max((mine[name].double() - others[name].double()).abs().max().item() for name in weights)


def run(entry: Entry, words: list[str], out: Path) -> Result:
    if entry.why_not:
        return Result(entry, [], [], entry.why_not)
    run_dir = out / entry.label
    given = [*words, f"strategy={entry.name}", *entry.words, f"runs_dir={quote(str(out))}", f"name={entry.label}"]
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
        said = [line.strip() for line in done.stdout.splitlines() if "error: " in line]
        reason = failure["message"] if failure else said[-1] if said else f"exit code {done.returncode}"
        problem = reason.splitlines()[0].partition("error: ")[2] or reason
        return Result(entry, [], [], problem, refused=done.returncode == REFUSED)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    files = sorted((run_dir / "checkpoints").glob("step_*.pt"), key=lambda path: (len(path.name), path.name))
    weights = [torch.load(path, weights_only=True)["model"] for path in (files[0], files[-1])]
    return Result(entry, records, weights, None, read_json(run_dir / "profile" / "summary.json"))


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    """The table's cells, in words. The row of what did not run ends with the reason."""
    single = results[0]
    table = []
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


def used(profile: dict | None) -> tuple[str, str]:
    """Memory and bytes sent, in words."""
    if profile is None:
        return "", ""
    sent = profile["bytes_per_step"]
    return (
        f"{max(profile['peak_memory_bytes']) / 2**20:,.0f} MiB",
        "not seen" if None in sent else f"{short(float(f'{max(sent):.3g}'))}B",
    )


def draw(results: list[Result], path: Path) -> None:
    ran = [result for result in results if not result.problem]
    by_epoch, by_time = [], []
    for result in ran:
        accuracy = [record["test_accuracy"] for record in result.records]
        clock = itertools.accumulate([result.seconds, *(record["seconds"] for record in result.records[1:])])
        by_epoch.append(Curve(result.name, [(record["epoch"], record["test_accuracy"]) for record in result.records]))
        by_time.append(Curve(result.name, list(zip(clock, accuracy, strict=True))))
    plots = [
        curves("Test accuracy by epoch: one curve", "epoch", "accuracy", by_epoch),
        curves("and by seconds of training", "s", "accuracy", by_time),
        bars("Samples a second", "samples/s", {result.name: result.rate for result in ran}),
        curves("Samples a second by devices", "devices", "samples/s", scaling(ran), zero=True),
    ]
    split = {result.name: mean_split(result.profile) for result in ran if result.profile}
    plots += [stacked("Where a step's time goes", "ms", split)] if split else []
    beside(plots, path)


def scaling(ran: list[Result]) -> list[Curve]:
    """A line for each strategy of several processes, from single's point on; and the ideal one."""
    start = [(1, result.rate) for result in ran if result.name == "single"]
    most = max(result.entry.devices for result in ran)
    lines = [Curve("ideal", [(1, start[0][1]), (most, most * start[0][1])], dashed=True)] if start and most > 1 else []
    for name in dict.fromkeys(result.entry.name for result in ran if result.entry.ranks is not None):
        lines.append(Curve(name, start + [(r.entry.devices, r.rate) for r in ran if r.entry.name == name]))
    return lines or [Curve("single", start or [(result.entry.devices, result.rate) for result in ran])]


def verdicts(results: list[Result]) -> list[str]:
    """What the profiles say, a line for each run."""
    return [f"{result.name}: {'. '.join(result.profile['verdict'])}" for result in results if result.profile]


def html_row(tag: str, row: Sequence[str]) -> str:
    """The last cell of a row that lacks some is a sentence, and gets their columns."""
    *cells, last = (f">{html.escape(cell)}</{tag}>" for cell in row)
    missing = len(COLUMNS) - len(row)
    wide = f" colspan={missing + 1} style='text-align:left'" if missing else ""
    return f"<tr>{''.join(f'<{tag}{cell}' for cell in cells)}<{tag}{wide}{last}</tr>"


def report(table: list[tuple[str, ...]], head: list[str], words: list[str], out: Path) -> str:
    """Writes report.md and report.html; returns the first."""
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
            *(f"- {line}" for line in words),
            "",
            *(f"*{note}*\n" for note in NOTES),
            "![accuracy and speed](plots.png)",
            "",
        ]
    )
    (out / "report.md").write_text(text)
    picture = base64.b64encode((out / "plots.png").read_bytes()).decode()
    cells = "".join(html_row(tag, row) for tag, row in [("th", COLUMNS), *(("td", row) for row in table)])
    style = "body{font:15px sans-serif;margin:2em;max-width:80em}td,th{padding:.3em .8em;text-align:right}"
    style += "td{border-top:1px solid #ddd}td:first-child,th:first-child{text-align:left}img{max-width:100%}"
    (out / "report.html").write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Every strategy on the same work</title><style>{style}</style>"
        f"<h1>Every strategy on the same work</h1>{''.join(f'<p>{html.escape(line)}</p>' for line in head)}"
        f"<table>{cells}</table><ul>{''.join(f'<li>{html.escape(line)}' for line in words)}</ul>"
        f"{''.join(f'<p><i>{html.escape(note)}</i></p>' for note in NOTES)}"
        f"<p><img alt='accuracy and speed' src='data:image/png;base64,{picture}'></p></html>"
    )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = 0 if "device=cpu" in sys.argv else torch.cuda.device_count()
    powers = [2**power for power in range(1, 10) if 2**power <= gpus]
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=powers or [2], help="of the strategies of several processes, each in turn"
    )
    parser.add_argument("--strategies", nargs="+", help="some of them; single always runs")
    parser.add_argument("--out", type=Path, default=None, help="else runs/compare-<time>")
    parser.add_argument("words", nargs="*", help="of train.py, for all strategies")
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
        words = " ".join(sorted(unknown))
        parser.error(f"--strategies {words}: there is no such strategy; allowed: {names}. Words of train.py go behind --")
    for word in arguments.words:
        if word.partition("=")[0] in ("runs_dir", "name", "strategy"):
            parser.error(f"{word}: is compare.py's own to choose; see --out and --strategies")
    out = new_folder(arguments.out or ROOT / "runs" / f"compare-{datetime.now():%Y%m%d-%H%M%S}")
    words = arguments.words or [
        "epochs=4",
        "model.init_std=null",
        "optimizer.lr=0.03",
    ]  # so few steps that rounding stays small
    results = [run(chosen[0], [*words, "profile=true"], out)]
    profile = ["profile=true"]
    if results[0].refused:
        again = run(chosen[0], words, out)
        if not again.refused:  # so it was the profile, which a short run or its device cannot have
            print(f"without profiles: {results[0].problem}")
            profile, results = [], [again]
    results += [run(entry, words + profile, out) for entry in chosen[1:]]
    if all(result.problem for result in results):
        sys.exit(f"error: nothing ran: {results[0].problem}")
    draw(results, out / "plots.png")
    where = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"{os.cpu_count()} CPU cores"
    some = f" --strategies {' '.join(arguments.strategies)}" if arguments.strategies else ""
    head = [
        f"python scripts/compare.py --ranks {' '.join(map(str, arguments.ranks))}{some} -- {shlex.join(words)}",
        f"{where}, torch {torch.__version__}, Python {platform.python_version()}, {datetime.now():%Y-%m-%d %H:%M}",
    ]
    print("\n" + report(rows(results), head, verdicts(results), out))
    print(f"{out}/report.html   tensorboard --logdir {out}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
