"""Compare the metrics of every strategy in this working tree and a commit, to the last digit.

    python scripts/same_numbers.py HEAD~1
    python scripts/same_numbers.py v1.0 --strategies ddp fsdp -- model=resnet18 data=synthetic \\
        data.dataset.image_size=16

Use it to verify that a refactoring changes no number. Each strategy is trained on the CPU, in a
checkout of the commit and in this tree, and the files metrics.jsonl are compared, except for times
and for metrics that the commit does not record. OVERRIDES sets keys that affect the numbers to
values other than their defaults. Exit code 0: all metrics are equal; 1: some differ, or a run
failed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ddp_lab.observe.metrics_file import read_epochs

ROOT = Path(__file__).parent.parent
STRATEGIES = {"single": 1, "dp": 1, "split": 1, "ddp_pipeline": 4}  # and their numbers of ranks
STRATEGIES |= dict.fromkeys(("scratch", "ddp", "pipeline", "tp", "fsdp", "mesh"), 2)
OVERRIDES = [
    "device=cpu",
    "epochs=2",
    "batch_size=48",
    "seed=3",
    "accumulate=2",
    "max_grad_norm=0.5",
    "warmup_epochs=1",
    "scheduler=cosine",
    "optimizer.lr=0.05",
    "optimizer.weight_decay=0.001",
    "data.crop_padding=2",
]
TIMES = ("seconds", "samples_per_second")  # keys of metrics.jsonl that are not compared


def train(tree: Path, strategy: str, runs: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """Train a strategy in a working tree; return the metrics of each epoch, without times.

    Args:
        tree: root of the working tree whose train.py is run.
        runs: the runs_dir.
        overrides: Hydra overrides in addition to OVERRIDES.

    Raises:
        SystemExit: the run failed.
    """
    ranks = STRATEGIES[strategy]
    launcher = (
        []
        if ranks == 1
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    )
    arguments = [
        f"strategy={strategy}",
        *OVERRIDES,
        *overrides,
        f"runs_dir={runs}",
        f"name={strategy}",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    command = [sys.executable, *launcher, "train.py", *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(
            f"error: exit code {done.returncode} in {tree}: {' '.join(command)}\n"
            f"{done.stdout}{done.stderr}"
        )
    records = read_epochs(runs / strategy / "metrics.jsonl")
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="commit to compare this working tree with")
    parser.add_argument(
        "--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES, help="default: all"
    )
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for both trees, after --")
    arguments = parser.parse_intermixed_args()
    changed = []
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        runs = Path(folder)
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", before, arguments.commit],
            cwd=ROOT,
            check=True,
        )
        try:
            for strategy in arguments.strategies:
                old = train(before, strategy, runs / "old", arguments.overrides)
                new = train(ROOT, strategy, runs / "new", arguments.overrides)
                known = [
                    {key: record.get(key) for key in earlier}
                    for record, earlier in zip(new, old, strict=True)
                ]
                same = old == known
                changed += [] if same else [strategy]
                last = new[-1]
                print(
                    f"{strategy:13} {'the same' if same else 'CHANGED':9} test loss "
                    f"{last['test_loss']}",
                    flush=True,
                )
                if not same:
                    print(f"  before {old}\n  now    {new}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    if changed:
        sys.exit(
            f"error: the metrics of {', '.join(changed)} differ from those at {arguments.commit}"
        )


if __name__ == "__main__":
    main()
