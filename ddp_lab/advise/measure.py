"""What strategies take on the devices of this machine: short runs and a cache of results.

The short runs of train.py alternate.
"""

import hashlib
import os
import platform
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ddp_lab.advise.advisor import Advisor, Row
from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.short_run import ShortRun, train
from ddp_lab.resilience.run_directory import read_json, write_json

STEPS = 16  # of an epoch
EPOCHS = 4  # of a run: the first one warms up and is profiled, the others count
ROUNDS = 5  # the most runs of a strategy
# a strategy is measured again until its rates lie within this share of the median
SPREAD = 0.05


def measure(advisor: Advisor, minutes: float) -> None:
    """Measure the strategies that fit, in alternation, and keep the results.

    `Advisor.notes` names those that did not run.

    Args:
        advisor: after `advise`; `Row.measured` is set.
        minutes: when to stop; a strategy that has been measured once keeps its result.
    """
    end = time.monotonic() + 60 * minutes
    runs_by_name: dict[str, list[ShortRun]] = {row.name: [] for row in advisor.rows if row.fits}
    with tempfile.TemporaryDirectory() as folder:
        for number, row in ((number, row) for number in range(ROUNDS) for row in advisor.rows):
            if row.name not in runs_by_name or is_stable(runs_by_name[row.name]):
                continue
            if (left := end - time.monotonic()) <= 0:
                advisor.notes.append(f"stopped after {minutes:g} min; --minutes allows more")
                break

            name = f"{''.join(filter(str.isalnum, row.name))}-{number}"
            run = train(
                short_run(advisor, row),
                row.devices if row.ranks > 1 else None,
                Path(folder),
                name,
                left,
            )
            if run.problem:
                again = " again" if runs_by_name.pop(row.name) else ""
                advisor.notes.append(f"{row.name} was not measured{again}: {run.problem}")
            else:
                runs_by_name[row.name].append(run)
                row.measured = summary(advisor, row, runs_by_name[row.name])

    path = cache_of(advisor)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        path,
        (read_json(path) or {}) | {row.name: row.measured for row in advisor.rows if row.measured},
    )


def require_image_shape(advisor: Advisor) -> None:
    """Check that the runs can be measured, which have made-up images.

    Raises:
        ConfigError: the samples are no images.
    """
    if len(advisor.dataset.train.shape) != 3:
        raise ConfigError(
            "--measure: makes up images, but the samples of the data are none. Leave --measure "
            "out, and measure with the data themselves: python scripts/compare.py"
        )


def short_run(advisor: Advisor, row: Row) -> list[str]:
    """Return the overrides of a run that measures a strategy, with made-up images.

    They have the size of the dataset's images.
    """
    shape = advisor.dataset.train.shape
    sizes = {
        "channels": shape[0],
        "image_size": shape[1],
        "num_classes": len(advisor.dataset.classes),
    }
    sizes |= {"train_size": STEPS * row.images, "test_size": row.images}
    overrides = ["data=synthetic", *(f"data.dataset.{key}={size}" for key, size in sizes.items())]
    overrides += [
        override for override in advisor.common if not override.lstrip("+~").startswith("data")
    ]
    return [
        *overrides,
        *row.overrides,
        f"epochs={EPOCHS}",
        "profile=true",
        f"device={advisor.devices.kind}",
    ]


def is_stable(runs: list[ShortRun]) -> bool:
    """Return whether two runs or more lie close to each other."""
    rates = [statistics.median(run.rates) for run in runs]
    return len(rates) > 1 and max(rates) - min(rates) <= SPREAD * statistics.median(rates)


def summary(advisor: Advisor, row: Row, runs: list[ShortRun]) -> dict[str, Any]:
    """Return what the runs of a strategy measured, as plain values.

    On CPUs only the rate is known.
    """
    rate = statistics.median(each for run in runs for each in run.rates)
    result = {"images_per_second": rate, "runs": len(runs), "date": str(date.today())}
    if advisor.devices.kind == "cuda":
        profiles = [run.profile for run in runs if run.profile]
        result["exposed"] = statistics.median(exposed(profile["rows"]) for profile in profiles)
        result["allocated"] = max(max(profile["peak_memory_bytes"]) for profile in profiles)
    if peak := advisor.devices.peak(advisor.precision):
        result["mfu"] = statistics.mean(plan.flops for plan in row.plans) * rate / row.images / peak
    return result


def exposed(rows: list[dict[str, float]]) -> float:
    """Return the fraction of the steps in which devices only communicate.

    `rows` are those of a summary.json.
    """
    return sum(row["communication"] for row in rows) / sum(row["step"] for row in rows)


def cache_of(advisor: Advisor) -> Path:
    """Return the file of the results for this machine, run and version of torch."""
    devices = advisor.devices
    if devices.kind == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = f"{platform.node()} {platform.processor()}"
    measured = f"{name} {devices.number} {torch.__version__} {advisor.run_text}"
    key = hashlib.sha256(measured.encode()).hexdigest()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp_lab"
    return root / f"measured-{key[:16]}.json"


def offer(advisor: Advisor) -> None:
    """Fill in what was measured before on the devices that are here, with a note about it."""
    known = read_json(cache_of(advisor)) or {}
    for row in advisor.rows:
        row.measured = known.get(row.name, {})
    if dates := sorted({row.measured["date"] for row in advisor.rows if row.measured}):
        advisor.notes.append(
            f"images/s were measured on {', '.join(dates)}; --measure measures again"
        )
