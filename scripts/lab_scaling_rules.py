"""Lab: accuracy with k times the batch size, and the learning rate unchanged, times k, or times the square root of k.

python scripts/lab_scaling_rules.py                                    LeNet on the digits, batches of 64, 128, 256 and 512
python scripts/lab_scaling_rules.py --ks 1 2 4 8 16 -- model=resnet18 data=fashion_mnist epochs=10 batch_size=256

This is an exercise of Dive into Deep Learning, section 13.5: k devices with a batch of b each train on k x b samples per step
and take 1/k of the steps. Here only the batch grows, on one device, because the result does not depend on the number of devices
that share a batch. `none` keeps the learning rate, `linear` (Goyal et al. 2017, arXiv:1706.02677) multiplies it by k, `sqrt`
(Krizhevsky 2014, arXiv:1404.5997) by the square root of k. Arguments after -- are Hydra overrides of train.py for all runs;
batch_size is the batch of k = 1.
"""

import argparse
import subprocess
import sys
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.launch.sweep import quote  # noqa: E402
from ddp_lab.launch.torchrun import new_folder, world_command  # noqa: E402
from ddp_lab.observe.metrics_file import read_epochs  # noqa: E402
from ddp_lab.observe.plot import Curve, beside, curves  # noqa: E402
from ddp_lab.resilience.run_directory import read_json  # noqa: E402

RULES = ("none", "linear", "sqrt")


def accuracy(k: int, rule: str, batch: int, overrides: list[str], out: Path) -> float | None:
    """Train with k times the batch and return the test accuracy at the end; None if the loss became non-finite."""
    name = f"k{k}-{rule}"
    given = [*overrides, f"batch_size={k * batch}", f"lr_scaling={rule}", f"lr_base_batch_size={batch}"]
    given += [f"runs_dir={quote(str(out))}", f"name={name}"]
    done = subprocess.run(world_command(given, None), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        failure = read_json(out / name / "failure.json")
        if failure and failure["kind"] == "not_finite":
            return None
        print()
        errors = [line for line in done.stdout.splitlines() if "error: " in line]
        sys.exit(errors[-1] if errors else done.stdout)
    return read_epochs(out / name / "metrics.jsonl")[-1]["test_accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ks", type=int, nargs="+", default=[1, 2, 4, 8], help="factors of the batch")
    parser.add_argument("--out", type=Path, default=None, help="directory of the runs; default: runs/lab-scaling-rules-<time>")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of train.py, for all runs")
    arguments = parser.parse_args()
    batches = [override.partition("=")[2] for override in arguments.overrides if override.startswith("batch_size=")]
    given = batches[0] if batches else "64"
    if not given.isdecimal() or min(int(given), *arguments.ks) < 1:
        parser.error(f"batch_size={given} --ks {' '.join(map(str, arguments.ks))}: must be integers of at least 1")
    batch, out = int(given), new_folder(arguments.out or ROOT / "runs" / f"lab-scaling-rules-{datetime.now():%Y%m%d-%H%M%S}")
    overrides = [override for override in arguments.overrides if not override.startswith("batch_size=")]
    print("test accuracy at the end\n" + f"{'k':>4}{'batch':>8}" + "".join(f"{rule:>10}" for rule in RULES))
    ends: dict[str, list[tuple[float, float]]] = {rule: [] for rule in RULES}
    for k in arguments.ks:
        print(f"{k:>4}{k * batch:>8}", end="", flush=True)
        for rule in RULES:
            if k > 1 or rule == RULES[0]:  # with k = 1 all rules are the same
                found = accuracy(k, rule, batch, overrides, out)
            if found is not None:
                ends[rule].append((k, found))
            print(f"{'diverged' if found is None else f'{found:.4f}':>10}", end="", flush=True)
        print()
    lines = [Curve(rule, points) for rule, points in ends.items() if points]
    if lines:
        beside([curves("Test accuracy at the end", "k times the batch", "accuracy", lines)], out / "accuracy.png")
        print(f"\n{out}/accuracy.png")


if __name__ == "__main__":
    main()
