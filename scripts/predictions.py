"""Train under every strategy that this machine can run, and write predicted and measured memory and time side by side.

python scripts/predictions.py --out runs/predictions --ranks 2 -- model=resnet18 data=fashion_mnist epochs=2 batch_size=256

Arguments after -- are Hydra overrides of train.py. Every result is written to OUT/predictions.json as soon as it is there; the
table is printed at the end. Memory is the peak that torch has allocated on a GPU, without the CUDA context and NCCL. The time
of a step is that of the epochs after the first.
"""

import argparse
import json
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.launch.torchrun import new_folder  # noqa: E402
from ddp_lab.run.advise import Advisor, constants_for  # noqa: E402
from ddp_lab.run.candidates import Candidate  # noqa: E402
from ddp_lab.run.machine import find_machine  # noqa: E402
from scripts.compare import Entry, entries, run  # noqa: E402

MiB = 2**20


def predict(entry: Entry, overrides: list[str], gpus: str) -> dict[str, float]:
    """Return the predicted bytes and seconds of a step of a strategy."""
    machine = replace(find_machine(gpus, 1, None), per_node=entry.devices)
    advisor = Advisor(overrides, None, machine, constants_for(machine.card))
    pairs = (override.removeprefix("strategy.").split("=") for override in entry.overrides if override.startswith("strategy."))
    options = {key: int(value) for key, value in pairs}
    found = advisor.predict(Candidate(entry.name, options, entry.ranks or 1))
    return {"bytes": found.memory.allocated, "seconds": found.time.total, "batch": found.images_per_second * found.time.total}


def compare(entry: Entry, overrides: list[str], gpus: str, out: Path) -> dict[str, Any]:
    """Return the row of a strategy: what is predicted and measured, or the problem that kept it from running."""
    found: dict[str, Any] = {"strategy": entry.label, "devices": entry.devices, "predicted": predict(entry, overrides, gpus)}
    result = run(entry, [*overrides, "profile=true"], out)
    if result.problem:
        return found | {"problem": result.problem}
    peak = max(result.profile["peak_memory_bytes"]) if result.profile else None
    return found | {"measured": {"bytes": peak, "seconds": found["predicted"]["batch"] / result.rate}}


def error(row: dict[str, Any], key: str) -> str:
    """Return the error of a prediction in percent of the measurement."""
    measured = row["measured"][key]
    return f"{row['predicted'][key] / measured - 1:+.0%}" if measured else ""


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown, and how many pairs of strategies are ranked by time as measured."""
    lines = ["| strategy | GPUs | MiB: predicted | measured | error | ms: predicted | measured | error |", "|---" * 8 + "|"]
    ran = [row for row in rows if "measured" in row]
    for row in ran:
        predicted, measured = row["predicted"], row["measured"]
        cells = [row["strategy"], str(row["devices"]), f"{predicted['bytes'] / MiB:,.0f}"]
        cells += [f"{(measured['bytes'] or 0) / MiB:,.0f}", error(row, "bytes"), f"{1000 * predicted['seconds']:,.2f}"]
        cells += [f"{1000 * measured['seconds']:,.2f}", error(row, "seconds")]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"{row['strategy']}: not run: {row['problem']}" for row in rows if "problem" in row]
    pairs = [
        (one["predicted"]["seconds"] < other["predicted"]["seconds"])
        == (one["measured"]["seconds"] < other["measured"]["seconds"])
        for one, other in combinations(ran, 2)
    ]
    return "\n".join([*lines, "", f"{sum(pairs)} of {len(pairs)} pairs of strategies are ranked as measured"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the results, which must be empty")
    parser.add_argument("--ranks", type=int, nargs="*", default=[], help="numbers of ranks; without it, only single runs")
    parser.add_argument("--strategies", nargs="+", help="strategies to run; default: all")
    parser.add_argument("--gpus", default="here", help="predict for these GPUs, for a trial on a CPU: 1xH100")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of train.py")
    given = parser.parse_intermixed_args()
    out = new_folder(given.out)
    wanted = [entry for entry in entries(given.ranks, torch.cuda.device_count()) if not entry.why_not]
    rows: list[dict[str, Any]] = []
    for entry in wanted:
        if given.strategies and entry.name not in given.strategies:
            continue
        rows.append(compare(entry, given.overrides, given.gpus, out))
        (out / "predictions.json").write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
