"""Measure training loops side by side: stock torch's, Accelerate's, Lightning Fabric's, ours, and the kernels alone.

python scripts/bench.py                                       what our loop costs: in turns with the bare loop
python scripts/bench.py --gpus 1 2 4 --loops all --json runs/bench.json            a table of all loops

Without --loops, `ours eager` under strategy=single and `bare` take turns in one process, from the same weights, for `--seconds`
each with 1 and 2 threads on a CPU. After every `--turn` steps of one come as many of the other, so that what else the machine
does slows both. The ratio is the median over all pairs of bare's time divided by ours, beside its lower 95 % bound; then the
same of CPU time, which a busy machine changes less.

With --loops, the table has the throughput of the training loop alone in images per second, for made-up 28x28 images, `--batch`
of them on each device: the median of `--repeats`, and half the range between the quartiles in percent. All loops run
sequentially on the same machine; one that takes longer than `--patience` is ended, and the table says so. The ratio to quote is
that to the strongest loop that is not ours.

tutorial             DistributedDataParallel, float32, 4 DataLoader workers, `loss.item()` at every step
stock eager          torch alone, as an expert writes it: images on the device, bf16, channels_last, fused SGD
stock compile        the same after torch.compile, around DistributedDataParallel
stock overhead       the same with torch.compile(mode="reduce-overhead")
... inside           the same with the compiled model inside of DistributedDataParallel
accelerate, fabric   the tutorial with Hugging Face Accelerate or Lightning Fabric, bf16; if they are installed
... strong, compile, overhead  the same with the options of `stock eager`, `compile` and `overhead`
bare                 hand-written, eager, float32, images on the device: only the kernels of `ours eager`
ours eager           our loop with speed=off, without evaluations and checkpoints
ours auto, ... bf16  the same with speed=auto; with precision=bf16, too
ours                 the same with cuda_graph, compile, channels_last and bf16 (float32 on the CPU, where bf16 is slower)
kernels              the graph of `ours`, replayed without the loop
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

from benchmark.launches import compare, measure
from benchmark.ours import ON_CPU, ON_GPU, kernels, ours, turns
from benchmark.plain import bare, repeated, tutorial
from benchmark.report import draw, table, turns_table
from benchmark.strong import accelerate, fabric, stock

from ddp_lab.models.lenet import lenet
from ddp_lab.models.resnet import resnet18
from ddp_lab.world.runtime import Runtime

MODELS = {"lenet": lenet, "resnet18": resnet18}
MODES = {"compile": "default", "overhead": "reduce-overhead"}
LOOPS = {"tutorial": tutorial, "stock eager": partial(stock, mode=None)}
LOOPS["bare"] = lambda model, runtime, arguments: repeated(bare(model, runtime, arguments), arguments, runtime)
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
        model, loop = arguments.models[0], arguments.loop
        if loop == "turns":
            measured = turns(model, runtime, arguments)
        elif loop in ON_GPU:
            measured = ours(model, runtime, arguments, (ON_CPU if device == "cpu" else ON_GPU)[loop])
        else:
            other = LOOPS.get(loop)
            rates = other(MODELS[model](1, 28, 10, None), runtime, arguments) if other else kernels(model, runtime, arguments)
            measured = list(itertools.islice(rates, 1, arguments.repeats + 1))
        if runtime.rank == 0:
            Path(arguments.json).write_text(json.dumps(measured))
        os._exit(0)  # do not wait for DataLoader's workers and for process groups that other libraries opened


def parser(gpus: int) -> argparse.ArgumentParser:
    """Return the parser of the command line on a machine with so many GPUs."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument(
        "--gpus", type=int, nargs="+", default=[1, gpus] if gpus > 1 else [min(gpus, 1)], help="0: the CPU, with 1 and 2 ranks"
    )
    found.add_argument("--models", nargs="+", default=["lenet", "resnet18"], choices=MODELS)
    found.add_argument(
        "--strategies", nargs="+", default=["ddp", "scratch-flat"], help="strategies on several devices; scratch-ALGORITHM"
    )
    found.add_argument("--batch", type=int, default=256 if gpus else 64, help="samples on each device")
    found.add_argument("--steps", type=int, default=235 if gpus else 20, help="per repeat of `ours`; the others take a quarter")
    found.add_argument("--repeats", type=int, default=5)
    found.add_argument("--workers", type=int, default=4 if gpus else 0, help="DataLoader processes of each rank")
    found.add_argument("--patience", type=int, default=180, help="seconds that a launch may take")
    found.add_argument("--turn", type=int, default=20 if gpus else 1, help="steps of each loop before the other's turn")
    found.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads on a CPU")
    found.add_argument(
        "--seconds", type=int, default=40, help="how long two loops take turns, with each model and number of threads"
    )
    names = [*LOOPS, *ON_GPU, "kernels"]
    found.add_argument(
        "--loops", nargs="+", default=[], choices=["all", *names], metavar="LOOP", help=f"all, or of {', '.join(names)}"
    )
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
    on_cpu = arguments.gpus == [0]
    if arguments.loops:
        loops = [*LOOPS, *ON_GPU, "kernels"] if "all" in arguments.loops else arguments.loops
        works = [
            partial(measure, arguments, model, ranks, loop, strategy)
            for model, ranks in itertools.product(arguments.models, [1, 2] if on_cpu else arguments.gpus)
            for loop in loops
            for strategy in (["ddp"] if loop in LOOPS else ["single"] if ranks == 1 else arguments.strategies)
        ]
    else:
        cases = itertools.product(arguments.models, [1] if on_cpu else arguments.gpus, arguments.threads if on_cpu else [1])
        works = [partial(compare, arguments, *case) for case in cases]
    for work in works:
        rows.append(work())
        print({key: value for key, value in rows[-1].items() if not (arguments.loops and key == "rates")}, flush=True)
        if arguments.json:  # after every row, for a run that is ended early
            Path(arguments.json).write_text(json.dumps(record, indent=1))
    if arguments.json and arguments.loops:
        draw(rows, Path(arguments.json).with_suffix(".png"))
    print(f"\n{where}, torch {torch.__version__}, {record['time']}, batch {arguments.batch} on each device")
    print(table(rows) if arguments.loops else turns_table(rows))


if __name__ == "__main__":
    main()
