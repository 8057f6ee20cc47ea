"""Why two runs differ: what their directories record, compared, and what of it is the likely cause.

Every difference has a first step whose loss it can change. The seed changes the loss of step 1, the
learning rate that of step 2, momentum that of step 3. So the first step whose recorded losses
differ excludes some causes:

    step 1 differs                the samples, the initial weights, the model or the loss
    step 1 is equal, 2 differs    not the seed, because it would have changed step 1 already
    1e-7 at first                 another order of addition: ranks, devices, versions

It does not import torch.
"""

import math
from pathlib import Path
from typing import NamedTuple

from ddp_lab.run.first_loss import FirstLoss, first_loss
from ddp_lab.run.recorded_differences import Difference, recorded_differences


class Comparison(NamedTuple):
    """Two runs, compared.

    Attributes:
        loss: the first loss that differs; None: no recorded loss differs.
        compared: number of losses that both have recorded for the same steps.
        causes: what may have changed this loss, the likeliest one first.
        excluded: what differs, but cannot have changed it.
        without_effect: names of keys that change no loss.
        missing: files that one run has not recorded.
    """

    loss: FirstLoss | None
    compared: int
    causes: list[Difference]
    excluded: list[Difference]
    without_effect: list[str]
    missing: list[str]


def compare_runs(one: Path, other: Path) -> Comparison:
    """Compare two run directories.

    Raises:
        ConfigError: a directory has no config.yaml that can be read.
    """
    loss, compared = first_loss(one, other)
    differences = recorded_differences(one, other)
    names = [each.name for each in differences if each.effect == "none"]
    acting = [each for each in differences if each.effect != "none"]
    excluded = [] if loss is None else [each for each in acting if not is_possible(each, loss)]
    causes = [each for each in acting if each not in excluded]
    if loss is not None:
        causes.sort(key=lambda each: likelihood(each, loss))
    files = ("data.json", "environment.json", "metrics.jsonl")
    missing = [
        str(folder / file)
        for folder in (one, other)
        for file in files
        if not (folder / file).exists()
    ]
    return Comparison(
        loss=loss,
        compared=compared,
        causes=causes,
        excluded=excluded,
        without_effect=names,
        missing=missing,
    )


def is_possible(difference: Difference, loss: FirstLoss) -> bool:
    """Return whether a difference can have changed a loss."""
    is_evaluation = loss.name in ("val_loss", "test_loss")
    if difference.effect == "evaluation":
        return is_evaluation
    # an evaluation after a step sees the weights that this step has made
    return difference.first <= loss.step + is_evaluation


def likelihood(difference: Difference, loss: FirstLoss) -> tuple[bool, bool, int]:
    """Return by what causes are sorted: the likeliest one has the smallest value."""
    is_rounding = difference.effect == "rounding"
    is_early = not is_rounding and difference.first <= loss.equal_until
    # of those that act within the steps of the loss, the one that acts first; else the last one
    order = -difference.first if is_early else difference.first
    return is_rounding != loss.is_rounding, is_early, order


def describe(comparison: Comparison) -> str:
    """Return a comparison as text, of which the first lines say why the runs differ."""
    loss = comparison.loss
    lines: list[str] = []
    if loss is not None:
        lines.append(f"first loss that differs: {loss}")
        if comparison.causes:
            lines.append(f"likely cause: {comparison.causes[0]}")
        else:
            lines.append(
                "likely cause: nothing that both have recorded. Some GPU kernels add in any order; "
                "or code has changed in a module that the config does not name"
            )
        others = comparison.causes[1:]
    else:
        equal = f"no recorded loss differs, of {comparison.compared:,} that both have"
        none = "nothing to compare: there is no step of which both have recorded the loss"
        lines.append(equal if comparison.compared else none)
        others = comparison.causes
    if others:
        lines += ["differs, too:", *(f"  {each}" for each in others)]
    if comparison.excluded:
        lines.append("differs, but acts later than this loss, or on evaluations alone:")
        lines += [f"  {each}" for each in comparison.excluded]
    if comparison.without_effect:
        lines.append(f"differs without effect on losses: {', '.join(comparison.without_effect)}")
    if comparison.missing:
        lines.append(f"not recorded: {', '.join(comparison.missing)}")
    is_coarse = loss is not None and not math.isclose(loss.step - loss.equal_until, 1)
    if is_coarse:
        lines.append("the first step is not known exactly: log_every=1 records every step")
    return "\n".join(lines)
