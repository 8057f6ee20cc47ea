"""What strategies take on the devices that are here: short runs of train.py, in alternation."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from ddp_lab.advise.advisor import Advisor, Row
from ddp_lab.launchers.short_run import ShortRun, train

STEPS, EPOCHS = 16, 4  # of a run: the first epoch warms up, the others count
ROUNDS, SPREAD = 5, 0.05  # a strategy is measured again until its rates lie within this share of the median


def measure(advisor: Advisor, minutes: float) -> None:
    """Measure the strategies that fit, in alternation. `Advisor.notes` names those that did not run.

    Args:
        advisor: after `advise`; `Row.measured` is set.
        minutes: when to stop; a strategy that has been measured once keeps its result.
    """
    end = time.monotonic() + 60 * minutes
    found: dict[str, list[ShortRun]] = {row.name: [] for row in advisor.rows if row.fits}
    with tempfile.TemporaryDirectory() as folder:
        for number, row in ((number, row) for number in range(ROUNDS) for row in advisor.rows):
            if row.name not in found or is_stable(found[row.name]):
                continue
            if (left := end - time.monotonic()) <= 0:
                advisor.notes.append(f"stopped after {minutes:g} minutes; --minutes allows more")
                break
            name = f"{''.join(filter(str.isalnum, row.name))}-{number}"
            run = train(short_run(advisor, row), row.devices if row.ranks > 1 else None, Path(folder), name, left)
            if run.problem:
                again = " again" if found.pop(row.name) else ""
                advisor.notes.append(f"{row.name} was not measured{again}: {run.problem}")
            else:
                found[row.name].append(run)
                row.measured = summary(advisor, row, found[row.name])


def short_run(advisor: Advisor, row: Row) -> list[str]:
    """Return the overrides of a run that measures a strategy, with made-up images of the size of the dataset's."""
    shape = advisor.dataset.train.shape
    sizes = {"channels": shape[0], "image_size": shape[1], "num_classes": len(advisor.dataset.classes)}
    sizes |= {"train_size": STEPS * row.images, "test_size": row.images}
    given = ["data=synthetic", *(f"data.dataset.{key}={size}" for key, size in sizes.items())]
    given += [override for override in advisor.common if not override.lstrip("+~").startswith("data")]
    return [*given, *row.overrides, f"epochs={EPOCHS}", f"device={advisor.devices.kind}"]


def is_stable(runs: list[ShortRun]) -> bool:
    """Return whether two runs or more lie close to each other."""
    rates = [statistics.median(run.rates) for run in runs]
    return len(rates) > 1 and max(rates) - min(rates) <= SPREAD * statistics.median(rates)


def summary(advisor: Advisor, row: Row, runs: list[ShortRun]) -> dict[str, Any]:
    """Return what the runs of a strategy found, as plain values; the MFU only where the peak of the devices is known."""
    rate = statistics.median(each for run in runs for each in run.rates)
    found = {"images_per_second": rate, "runs": len(runs)}
    if peak := advisor.devices.peak(advisor.cfg.precision):
        found["mfu"] = statistics.mean(plan.flops for plan in row.plans) * rate / row.images / peak
    return found
