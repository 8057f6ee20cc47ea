"""What `ddp-lab advise` predicts for the runs of scripts/compare.py, beside what was measured."""

from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import yaml

from ddp_lab.config.errors import ConfigError
from ddp_lab.run.advise import constants_for
from ddp_lab.run.advisor import Advisor
from ddp_lab.run.candidates import Candidate
from ddp_lab.run.machine import find_machine
from scripts.comparison.runs import Result

MiB = 2**20


class Comparison(NamedTuple):
    """A strategy's predicted and measured values.

    Attributes:
        memory: bytes on the fullest GPU, without the CUDA context and NCCL, as torch counts them; None: not measured.
        rate: images per second; None: not measured on GPUs.
    """

    strategy: str
    devices: int
    memory: tuple[float, float | None]
    rate: tuple[float, float | None]


def predict(
    name: str, given: list[str], ranks: int | None, devices: int, overrides: list[str], gpus: str
) -> tuple[float, float]:
    """Return the predicted bytes on the fullest GPU, and images per second.

    Args:
        name: of the strategy.
        given: overrides of its options.
        ranks: None: one process.
        overrides: of train.py, for all strategies.
        gpus: as in `ddp-lab advise --gpus`.

    Raises:
        ConfigError: the strategy cannot be predicted.
    """
    machine = replace(find_machine(gpus, 1, None), per_node=devices)
    advisor = Advisor(overrides, None, machine, constants_for(machine.card))
    pairs = (override.removeprefix("strategy.").split("=", 1) for override in given if override.startswith("strategy."))
    found = advisor.predict(Candidate(name, {key: yaml.safe_load(value) for key, value in pairs}, ranks or 1))
    return found.memory.allocated, found.images_per_second


def comparison_table(comparisons: list[Comparison]) -> list[str]:
    """Return the lines of a Markdown table, and how many pairs of strategies are ranked as measured."""
    lines = ["| strategy | devices | MiB: predicted | measured | error | samples/s: predicted | measured | error |"]
    lines.append("|---" * 8 + "|")
    for strategy, devices, memory, rate in comparisons:
        cells = [strategy, str(devices), f"{memory[0] / MiB:,.0f}"]
        cells += ["", ""] if memory[1] is None else [f"{memory[1] / MiB:,.0f}", f"{memory[0] / memory[1] - 1:+.0%}"]
        cells += [f"{rate[0]:,.0f}"]
        cells += ["", ""] if rate[1] is None else [f"{rate[1]:,.0f}", f"{rate[0] / rate[1] - 1:+.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    measured = [(rate[0], rate[1]) for *_, rate in comparisons if rate[1] is not None]
    if not measured:
        return lines
    pairs = [(one[0] < other[0]) == (one[1] < other[1]) for one, other in combinations(measured, 2)]
    return [*lines, "", f"{sum(pairs)} of {len(pairs)} pairs of strategies are ranked by speed as measured."]


def predictions(results: list[Result], overrides: list[str], gpus: str, on_gpus: bool) -> list[str]:
    """Return a Markdown table of predicted and measured values of the strategies that ran.

    Args:
        results: of the runs.
        overrides: of train.py, for all strategies.
        gpus: as in `ddp-lab advise --gpus`.
        on_gpus: whether the runs used GPUs. What was measured on CPUs cannot be compared with the predictions, and is left out.
    """
    comparisons: list[Comparison] = []
    problems: list[str] = []
    for entry, rate, profile in ((result.entry, result.rate, result.profile) for result in results if not result.problem):
        given = [*entry.overrides, *entry.options]
        try:
            memory, predicted = predict(entry.name, given, entry.ranks, entry.devices, overrides, gpus)
        except ConfigError as error:
            problems += ["", f"{entry.title} is not predicted: {error}"]
            continue
        measured = max(profile["peak_memory_bytes"]) if profile and on_gpus else None
        rates = predicted, rate if on_gpus else None
        comparisons.append(Comparison(entry.title, entry.devices, (memory, measured), rates))
    heading = f"Predicted for {gpus}, and measured:" if gpus != "here" else "Predicted and measured:"
    return [
        "",
        heading if on_gpus else f"Predicted for {gpus}. The runs were on CPUs, so there is nothing to compare:",
        "",
        *comparison_table(comparisons),
        *problems,
    ]
