"""Lab: k times the batch; what becomes of the accuracy with the learning rate left, times k, or times the root of k?

python scripts/lab_scaling_rules.py                                    LeNet on the digits, batches of 64, 128, 256 and 512
python scripts/lab_scaling_rules.py --ks 1 2 4 8 16 -- model=resnet18 data=fashion_mnist epochs=10 batch_size=256

The books' exercises: k devices with a batch of b each train on k x b at once and take a k-th of the steps. Here the batch
alone grows, on one device, for by the second invariant it does not matter over how many it is spread. `none` leaves the rate,
`linear` (Goyal et al. 2017, arXiv:1706.02677) multiplies it by k, `sqrt` (Krizhevsky 2014, arXiv:1404.5997) by the root of k.
Words are train.py's own, for all runs; batch_size is that of k = 1.
"""

import argparse
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.launch.sweep import quote  # noqa: E402
from ddp_lab.launch.torchrun import new_folder, world_command  # noqa: E402
from ddp_lab.observe.plot import Curve, beside, curves  # noqa: E402
from ddp_lab.resilience.run_directory import read_json  # noqa: E402

RULES = ("none", "linear", "sqrt")


def accuracy(k: int, rule: str, batch: int, words: list[str], out: Path) -> float | None:
    """Test accuracy at the end; None where the loss was not finite before."""
    name = f"k{k}-{rule}"
    given = [*words, f"batch_size={k * batch}", f"lr_scaling={rule}", f"lr_base_batch_size={batch}"]
    given += [f"runs_dir={quote(str(out))}", f"name={name}"]
    done = subprocess.run(world_command(given, None), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        failure = read_json(out / name / "failure.json")
        if failure and failure["kind"] == "not_finite":
            return None
        print()
        said = [line for line in done.stdout.splitlines() if "error: " in line]
        sys.exit(said[-1] if said else done.stdout)
    return json.loads((out / name / "metrics.jsonl").read_text().splitlines()[-1])["test_accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--out", type=Path, default=None, help="else runs/lab-scaling-rules-<time>")
    parser.add_argument("words", nargs="*", help="of train.py, for all runs")
    arguments = parser.parse_args()
    given = next((word.partition("=")[2] for word in arguments.words if word.startswith("batch_size=")), "64")
    if not given.isdecimal() or min(int(given), *arguments.ks) < 1:
        parser.error(f"batch_size={given} --ks {' '.join(map(str, arguments.ks))}: must be integers of at least 1")
    batch, out = int(given), new_folder(arguments.out or ROOT / "runs" / f"lab-scaling-rules-{datetime.now():%Y%m%d-%H%M%S}")
    words = [word for word in arguments.words if not word.startswith("batch_size=")]
    print("test accuracy at the end\n" + f"{'k':>4}{'batch':>8}" + "".join(f"{rule:>10}" for rule in RULES))
    ends: dict[str, list[tuple[float, float]]] = {rule: [] for rule in RULES}
    for k in arguments.ks:
        print(f"{k:>4}{k * batch:>8}", end="", flush=True)
        for rule in RULES:
            if k > 1 or rule == RULES[0]:  # with k = 1 the rules are one
                found = accuracy(k, rule, batch, words, out)
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
