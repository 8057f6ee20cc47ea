"""The plots of a comparison: accuracy, throughput, scaling and time split."""

import itertools
from pathlib import Path

from ddp_lab.observe.plot import Curve, bars, beside, curves, stacked
from ddp_lab.observe.profile_report import mean_split
from scripts.comparison.runs import Result


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
        curves("Test accuracy by epoch", "epoch", "accuracy", by_epoch),
        curves("Test accuracy by seconds of training", "s", "accuracy", by_time),
        bars("Throughput", "samples/s", {result.name: result.rate for result in ran}),
        curves("Throughput by devices", "devices", "samples/s", scaling(ran), zero=True),
    ]
    if not results[0].problem:
        growth = {result.name: result.differences(results[0]).items() for result in ran if result is not results[0]}
        lines = [Curve(name, [(step, value) for step, value in found if value > 0]) for name, found in growth.items()]
        if any(line.points for line in lines):
            plots.append(curves("Largest difference of a weight from single's", "step", "difference", lines, log=True))
    split = {result.name: mean_split(result.profile) for result in ran if result.profile}
    plots += [stacked("Where a step's time goes", "ms", split)] if split else []
    beside(plots, path)


def scaling(ran: list[Result]) -> list[Curve]:
    """Return throughput by devices: a line from single's point for each strategy of several processes, and the ideal line."""
    start = [(1, result.rate) for result in ran if result.name == "single"]
    most = max(result.entry.devices for result in ran)
    lines = [Curve("ideal", [(1, start[0][1]), (most, most * start[0][1])], dashed=True)] if start and most > 1 else []
    for name in dict.fromkeys(result.entry.title for result in ran if result.entry.ranks is not None):
        lines.append(Curve(name, start + [(r.entry.devices, r.rate) for r in ran if r.entry.title == name]))
    return lines or [Curve("single", start or [(result.entry.devices, result.rate) for result in ran])]
