"""Measure training loops side by side: stock torch's, Accelerate's, Lightning Fabric's, ours, and the kernels alone.

python scripts/bench.py                                       on the available GPUs, or a small run on the CPU
python scripts/bench.py --gpus 1 2 4 --json runs/bench.json

The table has the throughput of the training loop alone in images per second, for made-up 28x28 images, `--batch` of them on
each device: the median of `--repeats`, and half the range between the quartiles in percent. All loops run sequentially on the
same machine; one that takes longer than `--patience` is ended, and the table says so. The ratio to quote is that to the
strongest loop that is not ours.

tutorial             DistributedDataParallel, float32, 4 DataLoader workers, `loss.item()` at every step
stock eager          torch alone, as an expert writes it: images on the device, bf16, channels_last, fused SGD
stock compile        the same after torch.compile, around DistributedDataParallel
stock overhead       the same with torch.compile(mode="reduce-overhead")
... inside           the same with the compiled model inside of DistributedDataParallel
accelerate, fabric   the tutorial with Hugging Face Accelerate or Lightning Fabric, bf16; if they are installed
... strong, compile, overhead  the same with the options of `stock eager`, `compile` and `overhead`
bare                 hand-written, eager, float32, images on the device: only the kernels of `ours eager`
ours eager           train.py with speed=off, but with the learning rate of the other loops
ours auto, ... bf16  train.py with speed=auto; with precision=bf16, too
ours                 train.py with cuda_graph, compile, channels_last and bf16 (float32 on the CPU, where bf16 is slower)
kernels              the graph of `ours`, replayed without the loop

The rates of train.py are read from metrics.jsonl, without the first epoch.
"""

import argparse
import itertools
import json
import os
import sys
from datetime import datetime
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmark.launches import measure
from benchmark.ours import ON_GPU, kernels
from benchmark.plain import bare, tutorial
from benchmark.report import draw, table
from benchmark.strong import accelerate, fabric, stock

from ddp_lab.models.lenet import lenet
from ddp_lab.models.resnet import resnet18
from ddp_lab.world.runtime import Runtime

MODELS = {"lenet": lenet, "resnet18": resnet18}
MODES = {"compile": "default", "overhead": "reduce-overhead"}
LOOPS = {"tutorial": tutorial, "bare": bare, "stock eager": partial(stock, mode=None)}
LOOPS |= {f"stock {word}": partial(stock, mode=mode) for word, mode in MODES.items()}
LOOPS |= {f"stock {word} inside": partial(stock, mode=mode, inside=True) for word, mode in MODES.items()}
for library, loop in {"accelerate": accelerate, "fabric": fabric}.items():
    LOOPS |= {library: partial(loop, strong=False, mode=None), f"{library} strong": partial(loop, strong=True, mode=None)}
    LOOPS |= {f"{library} {word}": partial(loop, strong=True, mode=mode) for word, mode in MODES.items()}


def rank_main(arguments: argparse.Namespace) -> None:
    """Run one loop on this rank and, on rank 0, write its rates."""
    device = "auto" if arguments.gpus != [0] else "cpu"
    with Runtime(device, timeout=arguments.patience // 2) as runtime:
        if runtime.world_size > 1 or arguments.loop == "kernels":
            runtime.open_group()
        torch.manual_seed(0)
        model = arguments.models[0]
        if arguments.loop == "kernels":
            rates = kernels(model, runtime, arguments)
        else:
            rates = LOOPS[arguments.loop](MODELS[model](1, 28, 10, None), runtime, arguments)
        next(rates)
        measured = [next(rates) for _ in range(arguments.repeats)]
        if runtime.rank == 0:
            Path(arguments.json).write_text(json.dumps(measured))
        os._exit(0)  # do not wait for DataLoader's workers and for process groups that other libraries opened


def parser(gpus: int) -> argparse.ArgumentParser:
    """Return the parser of the command line on a machine with so many GPUs."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument(
        "--gpus", type=int, nargs="+", default=[1, gpus] if gpus > 1 else [min(gpus, 1)], help="0: the CPU, with 1 and 2 ranks"
    )
    found.add_argument("--models", nargs="+", default=["lenet", "resnet18"] if gpus else ["lenet"], choices=MODELS)
    found.add_argument(
        "--strategies", nargs="+", default=["ddp", "scratch-flat"], help="strategies on several devices; scratch-ALGORITHM"
    )
    found.add_argument("--batch", type=int, default=256 if gpus else 64, help="samples on each device")
    found.add_argument("--steps", type=int, default=235 if gpus else 20, help="per repeat of `ours`; the others take a quarter")
    found.add_argument("--repeats", type=int, default=5)
    found.add_argument("--workers", type=int, default=4 if gpus else 0, help="DataLoader processes of each rank")
    found.add_argument("--patience", type=int, default=180, help="seconds that a launch may take")
    names = [*LOOPS, *ON_GPU, "kernels"]
    found.add_argument("--loops", nargs="+", default=names, choices=names, metavar="LOOP", help=", ".join(names))
    found.add_argument("--json", default=None, help="file for the numbers; a plot is written beside it")
    found.add_argument("--loop", help=argparse.SUPPRESS)
    found.add_argument("--strategy", help=argparse.SUPPRESS)
    return found


def check(arguments: argparse.Namespace, gpus: int) -> None:
    """Exit with a message if there are too few GPUs, or too few repeats for a median and quartiles."""
    if arguments.repeats < 2:
        sys.exit(f"error: --repeats {arguments.repeats}: must be at least 2, for the quartiles")
    if max(arguments.gpus) > gpus:
        allowed = f"at most {gpus}, or " * (gpus > 0) + "0 for the CPU"
        sys.exit(f"error: --gpus {max(arguments.gpus)}: this machine shows {gpus}; use {allowed}")


def main() -> None:
    gpus = torch.cuda.device_count()
    arguments = parser(gpus).parse_args()
    if arguments.loop:
        rank_main(arguments)
        return
    check(arguments, gpus)
    where = torch.cuda.get_device_name() if gpus and arguments.gpus != [0] else f"{os.cpu_count()} CPU cores"
    record = {"where": where, "torch": torch.__version__, "time": f"{datetime.now():%Y-%m-%d %H:%M}", "rows": (rows := [])}
    for model, ranks in itertools.product(arguments.models, [1, 2] if arguments.gpus == [0] else arguments.gpus):
        for loop in arguments.loops:
            strategies = ["single"] if ranks == 1 and loop not in LOOPS else arguments.strategies
            for strategy in ["ddp"] if loop in LOOPS else strategies:
                rows.append(measure(arguments, model, ranks, loop, strategy))
                print({key: value for key, value in rows[-1].items() if key != "rates"}, flush=True)
                if arguments.json:  # after every row, for a run that is ended early
                    Path(arguments.json).write_text(json.dumps(record, indent=1))
    if arguments.json:
        draw(rows, Path(arguments.json).with_suffix(".png"))
    print(f"\n{where}, torch {torch.__version__}, {record['time']}, batch {arguments.batch} on each device\n{table(rows)}")


if __name__ == "__main__":
    main()
