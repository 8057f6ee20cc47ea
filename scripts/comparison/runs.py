"""The strategies that a machine can run, and one run of each by train.py."""

import json
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddp_lab.advise.measure import train

SAVED = [1, 2, 5, 20]  # steps after which weights are saved, besides those at the end of epochs; steps 7 to 16 are profiled
EARLY = 5  # steps after which weights still agree up to rounding


class Entry(NamedTuple):
    """A strategy to run.

    Attributes:
        name: name of the strategy.
        overrides: Hydra overrides that it needs.
        ranks: number of processes; None runs train.py without torchrun.
        devices: number of devices it uses.
        why_not: why it cannot run on this machine; None if it can.
        options: further overrides of the strategy, which the user named.
    """

    name: str
    overrides: list[str]
    ranks: int | None
    devices: int
    why_not: str | None = None
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


def entries(counts: list[int], gpus: int) -> list[Entry]:
    """Return all strategies but mesh; those of several processes once for each number of ranks."""
    one = "cuda:0" if gpus else "cpu"
    alone = [
        Entry("single", [f"device={one}"], None, 1),
        Entry("dp", [], None, max(1, gpus), None if gpus else "without GPUs it has only one replica"),
        Entry("split", [], None, max(2, gpus) if gpus else 1, "needs two GPUs" if gpus == 1 else None),
    ]
    return alone[:1] + [entry for ranks in counts for entry in of_ranks(ranks)] + alone[1:]


def choose(values: list[str], counts: list[int], gpus: int) -> list[Entry]:
    """Return the entries of `--strategies`, after single.

    Args:
        values: names of strategies, with overrides of their options after them, for example "mesh strategy.tp=2".
        counts: numbers of ranks.
        gpus: number of GPUs.

    Raises:
        ValueError: there is no such strategy, or an override is not one of a strategy's options.
    """
    known = entries(counts, gpus) + [Entry("mesh", [], ranks, ranks) for ranks in counts]
    chosen = known[:1]
    for name, *options in (value.split() for value in values):
        found = [entry._replace(options=tuple(options)) for entry in known if entry.name == name]
        if not found:
            names = ", ".join(dict.fromkeys(entry.name for entry in known))
            raise ValueError(f"--strategies {name}: no such strategy; allowed: {names}. Put overrides of train.py after --")
        for option in options:
            if not re.match(r"strategy\.\w+=", option):
                raise ValueError(
                    f"--strategies '{name} {option}': must be strategy.KEY=VALUE, for example 'mesh strategy.tp=2'"
                )
        chosen += found
    return list({entry.label: entry for entry in chosen}.values())


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
    """The outcome of one strategy: its epochs in metrics.jsonl and its checkpoints, or why it did not run."""

    entry: Entry
    records: list[dict[str, Any]]
    checkpoints: dict[int, Path]  # by step
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

    def differences(self, other: "Result") -> dict[int, float]:
        """Return the largest absolute difference of a weight from another strategy's, by step."""
        return {step: largest_difference(path, other.checkpoints[step]) for step, path in self.checkpoints.items()}


@cache
def largest_difference(one: Path, other: Path) -> float:
    """Return the largest absolute difference of a weight between two checkpoints."""
    mine, others = (torch.load(path, weights_only=True)["model"] for path in (one, other))
    weights = [name for name, tensor in others.items() if tensor.is_floating_point()]  # without num_batches_tracked
    return max((mine[name].double() - others[name].double()).abs().max().item() for name in weights)


def run(entry: Entry, overrides: list[str], out: Path) -> Result:
    """Run train.py under one strategy and read what it wrote."""
    if entry.why_not:
        return Result(entry, [], {}, entry.why_not)
    given = [*overrides, f"strategy={entry.name}", *entry.overrides, *entry.options]
    given += ["checkpoint.every_epochs=1", f"checkpoint.at_steps={json.dumps(SAVED)}", "checkpoint.keep=100000"]
    done = train(given, entry.ranks, out, entry.label)
    files = {int(path.stem.removeprefix("step_")): path for path in (out / entry.label / "checkpoints").glob("step_*.pt")}
    return Result(entry, done.records, dict(sorted(files.items())), done.problem, done.profile, done.refused)
