"""What strategies take on the devices that are here: short runs of train.py, in alternation, and a cache of their results."""

import hashlib
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf

from ddp_lab.advise.advisor import Advisor, Row
from ddp_lab.launch.command import REFUSED
from ddp_lab.launch.sweep import quote
from ddp_lab.launch.torchrun import world_command
from ddp_lab.observe.metrics_file import read_epochs
from ddp_lab.observe.time_split import mean_split
from ddp_lab.resilience.run_directory import read_json, write_json

STEPS, EPOCHS = 16, 4  # of a run: the first epoch warms up and is profiled, the others count
ROUNDS, SPREAD = 5, 0.05  # a strategy is measured again until its rates lie within this share of the median


class Run(NamedTuple):
    """The outcome of a run of train.py.

    Attributes:
        records: of the epochs, as in metrics.jsonl.
        profile: as in summary.json; None without profile=true.
        problem: why it did not run; None if it did.
        refused: whether that is an error in the config.
    """

    records: list[dict[str, Any]]
    profile: dict[str, Any] | None
    problem: str | None = None
    refused: bool = False

    @property
    def rates(self) -> list[float]:
        """Samples per second of the epochs; the first, which tunes and is profiled, counts only if it is the only one."""
        return [record["samples_per_second"] for record in self.records[1:] or self.records]


def train(overrides: Sequence[str], ranks: int | None, out: Path, name: str, seconds: float | None = None) -> Run:
    """Run train.py once, and read what it wrote to `out`/`name`. Progress is printed.

    Args:
        overrides: of train.py.
        ranks: number of processes; None: without torchrun.
        out: directory of the run directory.
        name: of the run directory.
        seconds: the most that the run may take.
    """
    run_dir, start = out / name, time.perf_counter()
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    print(f"{name} ...", end=" ", flush=True)
    command = world_command([*overrides, f"runs_dir={quote(str(out))}", f"name={name}"], ranks)
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        print("stopped", flush=True)
        return Run([], None, "the time limit was reached")
    print(f"{time.perf_counter() - start:.0f} s", flush=True)
    (run_dir if run_dir.exists() else out).joinpath(f"{name}.output.txt").write_text(done.stdout)
    if done.returncode:
        failure = read_json(run_dir / "failure.json")
        errors = [line.strip() for line in done.stdout.splitlines() if "error: " in line]
        reason = failure["message"] if failure else errors[-1] if errors else f"exit code {done.returncode}"
        problem = reason.splitlines()[0].partition("error: ")[2] or reason
        return Run([], None, problem, refused=done.returncode == REFUSED)
    return Run(read_epochs(run_dir / "metrics.jsonl"), read_json(run_dir / "profile" / "summary.json"))


def measure(advisor: Advisor, minutes: float) -> None:
    """Measure the strategies that fit, in alternation, and keep the results. `Advisor.notes` names those that did not run.

    Args:
        advisor: after `advise`; `Row.measured` is set.
        minutes: when to stop; a strategy that has been measured once keeps its result.
    """
    end, advisor.notes = time.monotonic() + 60 * minutes, []
    found: dict[str, list[Run]] = {row.name: [] for row in advisor.rows if row.fits}
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
                advisor.notes.append(f"{row.name} was not measured: {run.problem}")
                del found[row.name]
            else:
                found[row.name].append(run)
    for row in advisor.rows:
        if runs := found.get(row.name):
            row.measured = summary(advisor, row, runs)
    path = cache_of(advisor)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, (read_json(path) or {}) | {row.name: row.measured for row in advisor.rows if row.measured})


def short_run(advisor: Advisor, row: Row) -> list[str]:
    """Return the overrides of a run that measures a strategy, with made-up images of the size of the dataset's."""
    shape = advisor.dataset.train.shape
    sizes = {"channels": shape[0], "image_size": shape[1], "num_classes": len(advisor.dataset.classes)}
    sizes |= {"train_size": STEPS * row.images, "test_size": row.images}
    given = ["data=synthetic", *(f"data.dataset.{key}={size}" for key, size in sizes.items())]
    given += [override for override in advisor.common if not override.lstrip("+~").startswith("data")]
    return [*given, *row.overrides, f"epochs={EPOCHS}", "profile=true", f"device={advisor.devices.kind}"]


def is_stable(runs: list[Run]) -> bool:
    """Return whether two runs or more lie close to each other."""
    rates = [statistics.median(run.rates) for run in runs]
    return len(rates) > 1 and max(rates) - min(rates) <= SPREAD * statistics.median(rates)


def summary(advisor: Advisor, row: Row, runs: list[Run]) -> dict[str, Any]:
    """Return what the runs of a strategy found, as plain values; on CPUs only the rate, which is all that is known."""
    rate = statistics.median(each for run in runs for each in run.rates)
    found = {"images_per_second": rate, "runs": len(runs), "date": str(date.today())}
    if advisor.devices.kind == "cuda":
        profiles = [run.profile for run in runs if run.profile]
        splits = [mean_split(profile) for profile in profiles]
        found["exposed"] = statistics.median(split["communication"] / sum(split.values()) for split in splits)
        found["allocated"] = max(max(profile["peak_memory_bytes"]) for profile in profiles)
    if peak := advisor.devices.peak(advisor.cfg.precision):
        found["mfu"] = statistics.mean(plan.flops for plan in row.plans) * rate / row.images / peak
    return found


def cache_of(advisor: Advisor) -> Path:
    """Return the file of the results for this machine, run and version of torch."""
    card = torch.cuda.get_device_name() if advisor.devices.kind == "cuda" else f"{platform.node()} {platform.processor()}"
    cfg = OmegaConf.to_yaml(OmegaConf.masked_copy(advisor.cfg, [str(key) for key in advisor.cfg if key != "strategy"]))
    key = hashlib.sha256("\n".join([card, str(advisor.devices.number), torch.__version__, cfg]).encode()).hexdigest()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp_lab"
    return root / f"measured-{key[:16]}.json"


def offer(advisor: Advisor) -> None:
    """Fill in what was measured before on the devices that are here, with a note about it."""
    known = read_json(cache_of(advisor)) or {}
    for row in advisor.rows:
        row.measured = known.get(row.name, {})
    if dates := sorted({row.measured["date"] for row in advisor.rows if row.measured}):
        advisor.notes.append(f"images/s were measured on {', '.join(dates)}; --measure measures again")
