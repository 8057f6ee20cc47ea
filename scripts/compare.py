"""Train the same model on the same batches under every strategy, and compare them in a report.

Only those run that this machine can run.

python scripts/compare.py            LeNet on the digits, on all available GPUs or two CPU ranks
python scripts/compare.py --ranks 2 4 -- model=resnet18 data=fashion_mnist epochs=3 batch_size=1024
python scripts/compare.py --ranks 4 --strategies ddp 'mesh strategy.tp=2' -- model=vit

A value of --strategies is the name of a strategy, with overrides of its options. Arguments after --
are Hydra overrides of train.py and apply to all strategies. All have the same seed, hence the same
initial weights, and the same GLOBAL batch, hence the same samples in every step. `--out` gets
report.md, and a run directory per strategy for `tensorboard --logdir OUT`.

speed-up      throughput divided by that of `single`; efficiency: the speed-up divided by the number
              of devices
memory        peak memory allocated on one device; without GPUs, peak resident size of one process,
              PyTorch included
throughput    without the first epoch, in which ten steps are profiled for the diagnosis below the
              table (profile=true)
energy        of all GPUs, from the driver's counters: joules of the training steps a sample,
              without the first epoch, and kWh of the run with its evaluations. Where no GPU has a
              counter there are no such columns
difference    largest difference of any weight from that of `single` after the first 5 steps, and at
              the end. Sums of float32 in another order round differently: expected below 1e-6 after
              5 steps. Training makes it grow; models with BatchNorm differ by more
              (docs/strategies.md)
"""

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import sys
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.launchers.short_run import ShortRun, train  # noqa: E402

# steps after which weights are saved, besides those at the end of epochs; steps 7 to 16 are
# profiled
SAVED = [1, 2, 5, 20]
EARLY = 5  # steps after which weights still agree up to rounding


class Entry(NamedTuple):
    """A strategy to run, on so many devices: its name and overrides.

    It has the overrides that it needs, and further ones of the user.

    `ranks` is the number of processes; None runs train.py without torchrun.
    """

    name: str
    overrides: list[str]
    ranks: int | None
    devices: int
    options: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The strategy's name, with the options that the user named."""
        return " ".join([self.name, *(option.removeprefix("strategy.") for option in self.options)])

    @property
    def label(self) -> str:
        """The name of the strategy's directory, bar and curve."""
        title = re.sub(r"\W+", "_", self.title)
        return title if self.ranks is None else f"{title}-{self.ranks}"


def entries(values: list[str] | None, counts: list[int], gpus: int) -> list[Entry]:
    """Return single and the entries of `--strategies`, those of processes for each number of ranks.

    Args:
        values: names of strategies, with overrides of their options after them, for example "mesh
            strategy.tp=2". None: all but mesh, dp where it has only one replica, and split where
            there is only one GPU.
        counts: numbers of ranks.
        gpus: number of GPUs.

    Raises:
        ValueError: there is no such strategy.
    """
    overrides: dict[str, list[str]] = {name: [] for name in ("scratch", "ddp", "fsdp", "pipeline")}
    overrides |= {"ddp_pipeline": ["strategy.pp=2"], "tp": ["strategy.tp=2"], "mesh": []}
    devices = {"dp": gpus, "split": max(1, gpus)}
    chosen = [Entry("single", [f"device={'cuda:0' if gpus else 'cpu'}"], None, 1)]
    everything = [name for name in overrides if name != "mesh"]
    if gpus > 0:
        everything.append("dp")
    if gpus != 1:
        everything.append("split")
    for name, *options in (value.split() for value in values or everything):
        if name in overrides:
            ranks = [count for count in counts if name != "ddp_pipeline" or count >= 4]
            chosen += [
                Entry(name, overrides[name], count, count, tuple(options)) for count in ranks
            ]
        elif name in devices:
            chosen.append(Entry(name, [], None, devices[name], tuple(options)))
        elif name != "single":
            names = ", ".join(["single", *overrides, *devices])
            raise ValueError(
                f"--strategies {name}: no such strategy; allowed: {names}. Put overrides of "
                "train.py after --"
            )
    return list({entry.label: entry for entry in chosen}.values())


class Result(NamedTuple):
    """The outcome of one strategy: its run, and its checkpoints by step."""

    entry: Entry
    run: ShortRun
    checkpoints: dict[int, Path]

    def differences(self, other: "Result") -> dict[int, float]:
        """Return the largest absolute difference of a weight from another strategy's, by step."""
        return {
            step: largest_difference(path, other.checkpoints[step])
            for step, path in self.checkpoints.items()
        }


@cache
def largest_difference(one: Path, other: Path) -> float:
    """Return the largest absolute difference of a weight between two checkpoints."""
    mine, others = (torch.load(path, weights_only=True)["model"] for path in (one, other))
    # without num_batches_tracked
    weights = [name for name, tensor in others.items() if tensor.is_floating_point()]
    return max((mine[name].double() - others[name].double()).abs().max().item() for name in weights)


def run(entry: Entry, overrides: list[str], out: Path) -> Result:
    """Run train.py under one strategy and read what it wrote."""
    line = [*overrides, f"strategy={entry.name}", *entry.overrides, *entry.options]
    line += [
        "checkpoint.every_epochs=1",
        f"checkpoint.at_steps={json.dumps(SAVED)}",
        "checkpoint.keep=100000",
    ]
    line += ["checkpoint.format=full"]  # they are compared as files
    done = train(line, entry.ranks, out, entry.label)
    files = {
        int(path.stem.removeprefix("step_")): path
        for path in (out / entry.label / "checkpoints").glob("step_*.pt")
    }
    return Result(entry, done, dict(sorted(files.items())))


ENERGY = ("J/sample", "kWh")
COLUMNS = (
    "strategy",
    "devices",
    "s/epoch",
    "samples/s",
    "speed-up",
    "efficiency",
    "memory a device",
    *ENERGY,
    "test accuracy",
    f"difference after {EARLY} steps",
    "difference at the end",
)


def median_of(run: ShortRun, key: str) -> float:
    """Return the median of a value of the epochs.

    The first, which allocates and tunes, counts only if it is the only one.
    """
    return statistics.median(record[key] for record in run.records[1:] or run.records)


def has_energy(results: list[Result]) -> bool:
    """Return whether the energy of a run is known."""
    return any(record.get("energy_kWh") for result in results for record in result.run.records)


def energy_cells(run: ShortRun) -> list[str]:
    """Return the cells of the columns ENERGY; "" where the energy is unknown."""
    records = run.records[1:] or run.records
    by_epoch = [each["joules_per_sample"] for each in records if "joules_per_sample" in each]
    total = run.records[-1].get("energy_kWh")
    return [
        f"{statistics.median(by_epoch):.3g}" if by_epoch else "",
        "" if total is None else f"{total:.3g}",
    ]


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    """Return the cells of the table as text, those of ENERGY only where it is known.

    The row of a strategy that did not run ends with the reason.
    """
    single = results[0].run
    base = float("nan") if single.problem else median_of(single, "samples_per_second")
    table: list[tuple[str, ...]] = []
    with_energy = has_energy(results)
    for result in results:
        entry = result.entry
        run = result.run
        if run.problem:
            table.append((entry.title, str(entry.devices), f"not run: {run.problem}"))
            continue
        rate = median_of(run, "samples_per_second")
        by_step = {} if single.problem else result.differences(results[0])
        compared = (
            max((step for step in by_step if step <= EARLY), default=0),
            max(by_step, default=0),
        )
        differences = [f"{by_step[step]:.1e}" if by_step else "" for step in compared]
        table.append(
            (
                entry.title,
                str(entry.devices),
                f"{median_of(run, 'seconds'):.2f}",
                f"{rate:,.0f}",
                f"{rate / base:.2f}",
                f"{rate / base / entry.devices:.0%}",
                f"{max(run.profile['peak_memory_bytes']) / 2**20:,.0f} MiB"
                if run.profile
                else "not measured",
                *(energy_cells(run) if with_energy else ()),
                f"{run.records[-1]['test_accuracy']:.4f}",
                *differences,
            )
        )
    return table


def report(
    table: list[tuple[str, ...]], head: list[str], diagnosis: list[str], with_energy: bool
) -> str:
    """Return the text of report.md: lines above, the table's cells, lines below.

    Args:
        table: as from `rows`.
        head, diagnosis: the lines above and below.
        with_energy: whether the table has the columns ENERGY.
    """
    columns = [name for name in COLUMNS if with_energy or name not in ENERGY]
    padded = [[*row, *[""] * (len(columns) - len(row))] for row in table]
    cells = [f"| {' | '.join(row)} |" for row in (columns, *padded)]
    lines = [
        "# Every strategy on the same work",
        "",
        *head,
        "",
        cells[0],
        "|---" * len(columns) + "|",
        *cells[1:],
        "",
    ]
    return "\n".join(
        [
            *lines,
            *(f"- {line}" for line in diagnosis),
            "",
            "`python scripts/compare.py --help` describes the columns.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpus = 0 if "device=cpu" in sys.argv else torch.cuda.device_count()
    powers = [2**power for power in range(1, 10) if 2**power <= gpus]
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=powers or [2],
        help="numbers of ranks for the strategies of several processes",
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        help="strategies to run, all but mesh if none is named; single always runs",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="directory of the report; default: runs/compare-<time>",
    )
    parser.add_argument(
        "overrides", nargs="*", help="Hydra overrides of train.py, for all strategies"
    )
    arguments = parser.parse_intermixed_args()
    if min(arguments.ranks) < 1:
        parser.error(f"--ranks {' '.join(map(str, arguments.ranks))}: each must be at least 1")
    try:
        chosen = entries(arguments.strategies, arguments.ranks, gpus)
    except ValueError as error:
        parser.error(str(error))
    for override in arguments.overrides:
        if override.partition("=")[0] in ("runs_dir", "name", "strategy"):
            parser.error(f"{override}: is set by compare.py; use --out and --strategies")
    out: Path = (
        arguments.out or ROOT / "runs" / f"compare-{datetime.now():%Y%m%d-%H%M%S}"
    ).resolve()
    if out.exists() and any(out.iterdir()):  # the numbers of old runs would be mixed with new ones
        sys.exit(f"error: --out {arguments.out}: is not empty; use another folder")
    out.mkdir(parents=True, exist_ok=True)
    # The default has so few steps that rounding differences stay small.
    overrides = arguments.overrides or ["epochs=4", "optimizer.lr=0.03"]
    results = []
    for entry in chosen:
        results.append(run(entry, [*overrides, "profile=true"], out))
        if results[0].run.refused:
            break  # its mistake is that of all others
    if all(result.run.problem for result in results):
        sys.exit(f"error: nothing ran: {results[0].run.problem}")
    where = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"{os.cpu_count()} CPU cores"
    some = f" --strategies {shlex.join(arguments.strategies)}" if arguments.strategies else ""
    head = [
        f"python scripts/compare.py --ranks {' '.join(map(str, arguments.ranks))}{some} -- "
        f"{shlex.join(overrides)}",
        f"{where}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{datetime.now():%Y-%m-%d %H:%M}",
    ]
    profiled = [
        (result.entry.label, result.run.profile) for result in results if result.run.profile
    ]
    text = report(
        rows(results),
        head,
        [f"{label}: {'. '.join(profile['diagnosis'])}" for label, profile in profiled],
        has_energy(results),
    )
    (out / "report.md").write_text(text)
    print(f"\n{text}\n{out}/report.md   tensorboard --logdir {out}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
