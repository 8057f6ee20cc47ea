"""Whether a change left every number as it was: the metrics of every strategy, by this tree and by a commit before it.

python scripts/same_numbers.py HEAD~1
python scripts/same_numbers.py v1.0 --strategies ddp fsdp -- model=resnet18 data=synthetic data.dataset.image_size=16

Trains each strategy on the CPU in a checkout of the commit and in this tree, with every key that changes numbers set to
something else than its default, and compares metrics.jsonl to the last digit, times apart. Exit code 0: all are the same;
1: not all.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
RANKS = {"single": 1, "dp": 1, "split": 1, "ddp_pipeline": 4}  # the others: 2
STRATEGIES = ["single", "scratch", "dp", "ddp", "split", "pipeline", "ddp_pipeline", "tp", "fsdp"]
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
    "data.shift=2",
    "model.init_std=null",
]
TIMES = ("seconds", "samples_per_second")


def train(tree: Path, strategy: str, runs: Path, overrides: list[str]) -> list[dict]:
    """The metrics of each epoch.

    Raises:
        SystemExit: the run failed.
    """
    ranks = RANKS.get(strategy, 2)
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    words = [f"strategy={strategy}", *OVERRIDES, *overrides, f"runs_dir={runs}", f"name={strategy}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    command = [sys.executable, *launcher, "train.py", *words]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {tree}: {' '.join(command)}\n{done.stdout}{done.stderr}")
    records = [json.loads(line) for line in (runs / strategy / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="what to compare this tree with")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for both")
    arguments = parser.parse_args()
    changed = []
    with tempfile.TemporaryDirectory() as folder:
        before, runs = Path(folder) / "before", Path(folder)
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", before, arguments.commit], cwd=ROOT, check=True)
        try:
            for strategy in arguments.strategies:
                old = train(before, strategy, runs / "old", arguments.overrides)
                new = train(ROOT, strategy, runs / "new", arguments.overrides)
                same = old == new
                changed += [] if same else [strategy]
                last = new[-1]
                print(f"{strategy:13} {'the same' if same else 'CHANGED':9} test loss {last['test_loss']}", flush=True)
                if not same:
                    print(f"  before {old}\n  now    {new}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    if changed:
        sys.exit(f"error: the metrics changed under {', '.join(changed)}")


if __name__ == "__main__":
    main()
