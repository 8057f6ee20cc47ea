"""Measure training loops side by side: the tutorials', Accelerate's, Lightning Fabric's, ours, and the kernels alone.

python scripts/bench.py                                       on the available GPUs, or a small run on the CPU
python scripts/bench.py --gpus 1 2 4 --json runs/bench.json

The table has the throughput of the training loop alone in images per second, for made-up 28x28 images, `--batch` of them on
each device: the median of `--repeats`, and half the range between the quartiles in percent. All loops run sequentially on the
same machine.

tutorial      DistributedDataParallel, float32, 4 DataLoader workers, `loss.item()` at every step
accelerate    the same with Hugging Face Accelerate, bf16; if it is installed
fabric        the same with Lightning Fabric, bf16; if it is installed
bare          hand-written, eager, float32, images on the device: only the kernels of `ours eager`
ours eager    train.py with its defaults, but with the learning rate of the other loops
ours          train.py with cuda_graph, compile, channels_last and bf16 (float32 on the CPU, where bf16 is slower)
kernels       the graph of `ours`, replayed without the loop

The rates of train.py are read from metrics.jsonl, without the first epoch.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler
from torchvision.transforms.functional import to_tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from hydra import compose, initialize_config_dir  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

from ddp_lab.data.datasets import Synthetic  # noqa: E402
from ddp_lab.models.lenet import lenet  # noqa: E402
from ddp_lab.models.resnet import resnet18  # noqa: E402
from ddp_lab.observe.plot import Curve, bars, beside, curves  # noqa: E402
from ddp_lab.run.job import materialize, prepare  # noqa: E402
from ddp_lab.training.speed.cuda_graph import GraphStep  # noqa: E402
from ddp_lab.world.runtime import Runtime  # noqa: E402

MODELS = {"lenet": lenet, "resnet18": resnet18}
GPU_OPTIONS = ["cuda_graph=true", "compile=tuned", "channels_last=true", "precision=bf16"]
CPU_OPTIONS = ["compile=true"]


class Pictures(Dataset):
    """PIL images that are converted to tensors one by one, like those of torchvision's datasets."""

    def __init__(self, size: int):
        self.images, self.targets = Synthetic(size, 1, 1, 28, 10).load().train

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return to_tensor(Image.fromarray(self.images[index, 0].numpy())), self.targets[index].item()


def overrides(model: str, strategy: str, arguments: argparse.Namespace, ranks: int, performance: list[str]) -> list[str]:
    size = arguments.batch * ranks * arguments.steps
    data = ["data=synthetic", "data.dataset.channels=1", f"data.dataset.train_size={size}", "data.dataset.test_size=64"]
    chosen = ["scratch", "strategy.algorithm=" + strategy.partition("-")[2]] if "-" in strategy else [strategy]
    return [
        *data,
        f"model={model}",
        f"strategy={chosen[0]}",
        *chosen[1:],
        f"batch_size={arguments.batch}",
        "scaling=weak",
        "optimizer.lr=0.01",  # as in the other loops; with dead ReLUs a CPU computes slowly, with denormal numbers
        *performance,
    ]


# The loops, which run on every rank: each yields images per second repeatedly. The first value is a warm-up.


def repeated(step: Callable[[], None], steps: int, samples: int, device: torch.device) -> Iterator[float]:
    """Time `steps` calls of `step` repeatedly, and yield samples per second; each call trains on `samples`, over all ranks."""
    while True:
        wait(device)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait(device)
        yield steps * samples / (time.perf_counter() - start)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def loader_of(arguments: argparse.Namespace, ranks: int, distributed: bool) -> DataLoader:
    pictures = Pictures(10_000)
    many = arguments.batch * ranks * arguments.steps * (arguments.repeats + 2)
    sampler = RandomSampler(pictures, replacement=True, num_samples=many // ranks if distributed else many)
    workers = {"num_workers": arguments.workers, "pin_memory": torch.cuda.is_available()}
    return DataLoader(pictures, batch_size=arguments.batch, sampler=sampler, **workers)


def tutorial(model: nn.Module, runtime: Runtime, arguments: argparse.Namespace) -> Iterator[float]:
    device, ranks = runtime.device, runtime.world_size
    model = model.to(device)
    if ranks > 1:
        model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = iter(loader_of(arguments, ranks, distributed=True))
    running = 0.0

    def step() -> None:
        nonlocal running
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in next(batches))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        running += loss.item()

    return repeated(step, arguments.steps, arguments.batch * ranks, device)


def plain_step(model: nn.Module, optimizer, batches: Iterator, backward: Callable[[torch.Tensor], None]) -> None:
    """Take one step as in the guides of Accelerate and Fabric."""
    inputs, targets = next(batches)
    optimizer.zero_grad()
    backward(F.cross_entropy(model(inputs), targets))
    optimizer.step()


def accelerate(model: nn.Module, runtime: Runtime, arguments: argparse.Namespace) -> Iterator[float]:
    from accelerate import Accelerator

    helper = Accelerator(mixed_precision="bf16" if runtime.device.type == "cuda" else "no")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = helper.prepare(model, optimizer, loader_of(arguments, runtime.world_size, distributed=False))
    batches = iter(loader)

    step = partial(plain_step, model, optimizer, batches, helper.backward)
    return repeated(step, arguments.steps, arguments.batch * runtime.world_size, runtime.device)


def fabric(model: nn.Module, runtime: Runtime, arguments: argparse.Namespace) -> Iterator[float]:
    from lightning_fabric import Fabric

    cuda, ranks = runtime.device.type == "cuda", runtime.world_size
    helper = Fabric(
        accelerator="cuda" if cuda else "cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        precision="bf16-mixed" if cuda else "32-true",
    )
    helper.launch()
    model, optimizer = helper.setup(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    loader = loader_of(arguments, ranks, distributed=True)
    batches = iter(helper.setup_dataloaders(loader, use_distributed_sampler=False))

    step = partial(plain_step, model, optimizer, batches, helper.backward)
    return repeated(step, arguments.steps, arguments.batch * ranks, runtime.device)


def bare(model: nn.Module, runtime: Runtime, arguments: argparse.Namespace) -> Iterator[float]:
    device, ranks = runtime.device, runtime.world_size
    split = Synthetic(arguments.batch * ranks * arguments.steps, 1, 1, 28, 10).load().train
    images, targets = (tensor.to(device) for tensor in split)
    scale, shift = torch.tensor(1 / (255 * 0.5), device=device), torch.tensor(1.0, device=device)
    model = model.to(device)
    if ranks > 1:
        ids = [device] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    sampler = DistributedSampler(range(len(targets)), ranks, runtime.rank)
    order = itertools.cycle(torch.tensor(list(sampler), device=device).split(arguments.batch))

    def step() -> None:
        index = next(order)
        wanted = targets[index]
        logits = model(images[index] * scale - shift)
        loss = F.cross_entropy(logits, wanted, reduction="sum")
        (loss / arguments.batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        correct = (logits.argmax(1) == wanted).sum()
        totals.add_(torch.stack([loss.detach().double(), correct.double(), wanted.numel() * torch.ones_like(loss).double()]))

    return repeated(step, arguments.steps, arguments.batch * ranks, device)


def kernels(name: str, runtime: Runtime, arguments: argparse.Namespace) -> Iterator[float]:
    """Replay the captured step of `ours` on the first batches, and yield images per second."""
    strategy_name = arguments.strategy if runtime.world_size > 1 else "single"
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", overrides(name, strategy_name, arguments, runtime.world_size, GPU_OPTIONS))
    OmegaConf.resolve(cfg)
    runtime.precision = cfg.precision
    job = prepare(cfg, runtime)
    with job.options.switches(runtime):
        training = materialize(job)
        training.compile(arguments.steps)
        loader, step = job.loaders[0], training.step
        assert isinstance(step, GraphStep)
        graph = next(iter(step.graphs.values()))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        while True:
            loader.deal()
            wait(runtime.device)
            start.record()
            for _ in range(arguments.steps):
                graph.replay()
            end.record()
            wait(runtime.device)
            yield arguments.steps * arguments.batch * runtime.world_size / (start.elapsed_time(end) / 1000)


LOOPS = {"tutorial": tutorial, "accelerate": accelerate, "fabric": fabric, "bare": bare}


def rank_main(arguments: argparse.Namespace) -> None:
    """Run one loop on this rank and, on rank 0, write its rates."""
    device = "auto" if arguments.gpus != [0] else "cpu"
    with Runtime(device, timeout=arguments.patience // 2) as runtime:
        if runtime.world_size > 1 or arguments.loop == "kernels":
            runtime.open_group()
        torch.manual_seed(0)
        model = MODELS[arguments.models[0]](1, 28, 10, None)
        if arguments.loop == "kernels":
            rates = kernels(arguments.models[0], runtime, arguments)
        else:
            rates = LOOPS[arguments.loop](model, runtime, arguments)
        next(rates)
        measured = [next(rates) for _ in range(arguments.repeats)]
        if runtime.rank == 0:
            Path(arguments.json).write_text(json.dumps(measured))
        os._exit(0)  # do not wait for DataLoader's workers and for process groups that other libraries opened


# The launches.


def launch(arguments: argparse.Namespace, ranks: int, script: list[str], folder: Path) -> str | None:
    """Run a world of ranks to its end. Return None, or the last error line of its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *script]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if arguments.gpus == [0]:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    log = folder / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(arguments.patience)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"not done within {arguments.patience} s"
    if code == 0:
        return None
    lines = [line for line in log.read_text().splitlines() if "Error" in line or "error" in line]
    return lines[-1].strip() if lines else f"exit code {code}"


def measure(arguments: argparse.Namespace, model: str, ranks: int, loop: str, strategy: str) -> dict:
    """Return one row of the table."""
    row = {"model": model, "devices": ranks, "loop": loop, "strategy": strategy, "batch": arguments.batch}
    missing = {"accelerate": "accelerate", "fabric": "lightning_fabric"}.get(loop)
    if missing and find_spec(missing) is None:
        return row | {"skipped": f"{missing} is not installed"}
    if loop == "kernels" and arguments.gpus == [0]:
        return row | {"skipped": "CUDA graphs need a GPU"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if loop.startswith("ours"):
            performance = [] if loop == "ours eager" else CPU_OPTIONS if arguments.gpus == [0] else GPU_OPTIONS
            more = [
                f"epochs={arguments.repeats + 1}",
                f"runs_dir={folder}",
                "name=run",
                "checkpoint.every_epochs=1000",
                f"timeout={arguments.patience // 2}",  # compile=tuned takes minutes without progress
            ]
            problem = launch(
                arguments, ranks, ["train.py", *overrides(model, strategy, arguments, ranks, performance), *more], folder
            )
            metrics = folder / "run" / "metrics.jsonl"
            lines = metrics.read_text().splitlines()[1:] if metrics.exists() else []
            rates = [json.loads(line)["samples_per_second"] for line in lines]
        else:
            script = [__file__, "--loop", loop, "--strategy", strategy, "--models", model, "--json", str(folder / "rates")]
            numbers = ("batch", "steps", "repeats", "workers", "patience")
            arguments = argparse.Namespace(**vars(arguments) | {"steps": max(5, arguments.steps // 4)})
            script += [str(word) for key in numbers for word in (f"--{key}", getattr(arguments, key))]
            problem = launch(arguments, ranks, [*script, "--gpus", "0" if arguments.gpus == [0] else "1"], folder)
            rates = json.loads((folder / "rates").read_text()) if (folder / "rates").exists() else []
    if problem or len(rates) < 2:
        return row | {"skipped": problem or "no epoch was measured"}
    low, _, high = statistics.quantiles(rates, n=4)
    middle = statistics.median(rates)
    return row | {"rate": middle, "spread": (high - low) / 2 / middle, "rates": rates}


def table(rows: list[dict]) -> str:
    """Return the rates as a table, relative to the tutorial on as many devices, to one device, and to the kernels alone."""
    found = {(row["model"], row["devices"], row["loop"], row["strategy"]): row.get("rate") for row in rows}

    def of(row: dict, devices: int, loop: str) -> float | None:
        names = {"tutorial": ("ddp",), "kernels": (row["strategy"], "single")}.get(loop, (row["strategy"], "single"))
        return next((found[key] for name in names if (key := (row["model"], devices, loop, name)) in found), None)

    lines = ["| model | devices | loop | strategy | images/s | +- | tutorial | linear | kernels |", "|" + "---|" * 9]
    for row in rows:
        head = f"| {row['model']} | {row['devices']} | {row['loop']} | {row['strategy']} |"
        if "skipped" in row:
            lines.append(f"{head} not run: {row['skipped']} | | | | |")
            continue
        base, one, limit = of(row, row["devices"], "tutorial"), of(row, 1, row["loop"]), of(row, row["devices"], "kernels")
        ratio = f"{row['rate'] / base:.2f}x" if base else ""
        linear = f"{row['rate'] / one / row['devices']:.0%}" if one and row["devices"] > 1 else ""
        share = f"{row['rate'] / limit:.0%}" if limit and row["loop"] == "ours" else ""
        lines.append(f"{head} {row['rate']:,.0f} | {row['spread']:.1%} | {ratio} | {linear} | {share} |")
    return "\n".join(lines)


def draw(rows: list[dict], path: Path) -> None:
    """Plot, for each model, the loops' rates on the most devices, and the rate of `ours` by number of devices."""
    plots = []
    measured = [row for row in rows if "rate" in row]
    for model in dict.fromkeys(row["model"] for row in measured):
        mine = [row for row in measured if row["model"] == model]
        most = max(row["devices"] for row in mine)
        best = {}
        for row in mine:
            if row["devices"] == most:
                best[row["loop"]] = max(row["rate"], best.get(row["loop"], 0.0))
        plots.append(bars(f"{model} on {most} device{'s' * (most > 1)}", "images/s", best))
        alone = next((row["rate"] for row in mine if row["devices"] == 1 and row["loop"] == "ours"), None)
        lines = []
        for strategy in dict.fromkeys(row["strategy"] for row in mine if row["loop"] == "ours" and row["devices"] > 1):
            points = [(row["devices"], row["rate"]) for row in mine if (row["loop"], row["strategy"]) == ("ours", strategy)]
            lines.append(Curve(strategy, [*([(1, alone)] if alone else []), *points]))
        if lines and alone:
            lines.append(Curve("linear", [(1, alone), (most, most * alone)], dashed=True))
            plots.append(curves(f"{model}: more devices", "devices", "images/s", lines, zero=True))
    if plots:
        beside(plots, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = torch.cuda.device_count()
    parser.add_argument(
        "--gpus", type=int, nargs="+", default=[1, gpus] if gpus > 1 else [min(gpus, 1)], help="0: the CPU, with 1 and 2 ranks"
    )
    parser.add_argument("--models", nargs="+", default=["lenet", "resnet18"] if gpus else ["lenet"], choices=MODELS)
    parser.add_argument(
        "--strategies", nargs="+", default=["ddp", "scratch-flat"], help="strategies on several devices; scratch-ALGORITHM"
    )
    parser.add_argument("--batch", type=int, default=256 if gpus else 64, help="samples on each device")
    parser.add_argument(
        "--steps", type=int, default=235 if gpus else 20, help="per repeat of `ours`; the others take a quarter"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4 if gpus else 0, help="DataLoader processes of each rank")
    parser.add_argument("--patience", type=int, default=600, help="seconds that a launch may take")
    parser.add_argument("--loops", nargs="+", default=[*LOOPS, "ours eager", "ours", "kernels"])
    parser.add_argument("--json", default=None, help="file for the numbers; a plot is written beside it")
    parser.add_argument("--loop", help=argparse.SUPPRESS)
    parser.add_argument("--strategy", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.loop:
        rank_main(arguments)
        return
    rows = []
    for model, ranks in itertools.product(arguments.models, [1, 2] if arguments.gpus == [0] else arguments.gpus):
        for loop in arguments.loops:
            strategies = ["single"] if ranks == 1 and loop not in LOOPS else arguments.strategies
            for strategy in ["ddp"] if loop in LOOPS else strategies:
                rows.append(measure(arguments, model, ranks, loop, strategy))
                print({key: value for key, value in rows[-1].items() if key != "rates"}, flush=True)
    where = torch.cuda.get_device_name() if gpus and arguments.gpus != [0] else f"{os.cpu_count()} CPU cores"
    record = {"where": where, "torch": torch.__version__, "time": f"{datetime.now():%Y-%m-%d %H:%M}", "rows": rows}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1))
        draw(rows, Path(arguments.json).with_suffix(".png"))
    print(f"\n{where}, torch {torch.__version__}, {record['time']}, batch {arguments.batch} on each device\n{table(rows)}")


if __name__ == "__main__":
    main()
