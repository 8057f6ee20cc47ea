"""Train the same model on the same batches under every strategy that this machine can run, and compare them in a report.

python scripts/compare.py                                    LeNet on the digits, on all available GPUs or two CPU ranks
python scripts/compare.py --ranks 2 4 -- model=resnet18 data=fashion_mnist epochs=3 batch_size=1024
python scripts/compare.py --ranks 4 --strategies ddp 'mesh strategy.tp=2' 'mesh strategy.pp=2' -- model=vit

A value of --strategies is the name of a strategy, with overrides of its options. Arguments after -- are Hydra overrides of
train.py and apply to all strategies. All have the same seed, hence the same initial weights, and the same GLOBAL batch, hence
the same samples in every step. `--out` gets report.md, and a run directory per strategy for `tensorboard --logdir OUT`.

speed-up      throughput divided by that of `single`; efficiency: the speed-up divided by the number of devices
memory        peak memory allocated on one device; without GPUs, peak resident size of one process, PyTorch included
throughput    without the first epoch, in which ten steps are profiled for the diagnosis below the table (profile=true)
difference    largest difference of any weight from that of `single` after the first 5 steps, and at the end. Sums of float32 in
              another order round differently: expected below 1e-6 after 5 steps. Training makes it grow; models with BatchNorm
              differ by more (docs/strategies.md)
"""

import argparse
import os
import platform
import shlex
import sys
from datetime import datetime
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts.comparison import diagnoses, entries, headline, report, rows, run  # noqa: E402


def new_folder(path: Path) -> Path:
    """Create the folder of --out, and return its absolute path. One with old runs would mix their numbers with new ones."""
    if path.exists() and any(path.iterdir()):
        sys.exit(f"error: --out {path}: is not empty; use another folder")
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = 0 if "device=cpu" in sys.argv else torch.cuda.device_count()
    powers = [2**power for power in range(1, 10) if 2**power <= gpus]
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=powers or [2], help="numbers of ranks for the strategies of several processes"
    )
    parser.add_argument("--strategies", nargs="+", help="strategies to run, all but mesh if none is named; single always runs")
    parser.add_argument("--out", type=Path, default=None, help="directory of the report; default: runs/compare-<time>")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of train.py, for all strategies")
    arguments = parser.parse_intermixed_args()
    if min(arguments.ranks) < 1:
        parser.error(f"--ranks {' '.join(map(str, arguments.ranks))}: each must be at least 1")
    try:
        chosen = entries(arguments.strategies, arguments.ranks, gpus)
    except ValueError as error:
        parser.error(str(error))
    for override in arguments.overrides:
        if override.partition("=")[0] in ("runs_dir", "name", "strategy"):
            parser.error(f"{override}: is set by compare.py; use --out and --strategies")
    out = new_folder(arguments.out or ROOT / "runs" / f"compare-{datetime.now():%Y%m%d-%H%M%S}")
    # The default has so few steps that rounding differences stay small.
    overrides = arguments.overrides or ["epochs=4", "optimizer.lr=0.03"]
    results = []
    for entry in chosen:
        results.append(run(entry, [*overrides, "profile=true"], out))
        if results[0].run.refused:
            break  # its mistake is that of all others
    if all(result.run.problem for result in results):
        sys.exit(f"error: nothing ran: {results[0].run.problem}")
    where = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"{os.cpu_count()} CPU cores"
    some = f" --strategies {shlex.join(arguments.strategies)}" if arguments.strategies else ""
    head = [
        f"python scripts/compare.py --ranks {' '.join(map(str, arguments.ranks))}{some} -- {shlex.join(overrides)}",
        f"{where}, torch {torch.__version__}, Python {platform.python_version()}, {datetime.now():%Y-%m-%d %H:%M}",
    ]
    text = report(rows(results), head, headline(results) + diagnoses(results))
    (out / "report.md").write_text(text)
    print(f"\n{text}\n{out}/report.md   tensorboard --logdir {out}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
