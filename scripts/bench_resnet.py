"""Benchmark training on 224 x 224 images: train.py against the loop of torchvision's references, on made-up images and files.

python scripts/bench_resnet.py --models resnet18 resnet50 --json runs/bench_resnet.json      on one GPU
python scripts/bench_resnet.py --batch 4 --steps 2 --size 32 --workers 1                      a small run on the CPU

The numbers are images per second, the median of `--repeats` rounds of `--steps` steps:

reference            the loop of torchvision's references/classification and of timm: autocast to bf16, channels_last, SGD with
                     momentum; every step trains on one batch that is on the device already, as in timm's benchmark.py
reference compiled   the same after torch.compile, with fused SGD
ours                 train.py with cuda_graph, compile, channels_last and bf16, which also shuffles and normalises uint8 images
ours eager           train.py with channels_last and bf16
ours compiled        train.py with compile, channels_last and bf16
ours folder          `ours compiled` on JPEG files of 500 x 375 pixels, with data.cache=disk and `--workers` workers

Each loop runs in a process of its own, one after the other.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageFilter

from ddp_lab.observe.metrics_file import read_epochs

ROOT = Path(__file__).parent.parent
OURS = {
    "ours eager": ["precision=bf16", "channels_last=true"],
    "ours": ["precision=bf16", "channels_last=true", "compile=true", "cuda_graph=true"],
    "ours compiled": ["precision=bf16", "channels_last=true", "compile=true"],
    "ours folder": ["precision=bf16", "channels_last=true", "compile=true"],
}
LOOPS = ["reference", "reference compiled", *OURS]
DIFFERENT = 64  # files with different content; the others are links to them, because making noise is slow


def reference(arguments: argparse.Namespace, compiled: bool) -> list[float]:
    """Return the images per second of the reference loop, by round."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    model = torchvision.models.get_model(arguments.models[0]).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=compiled or None)
    forward = torch.compile(model) if compiled else model
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    targets = torch.randint(1000, (arguments.batch,), device=device)

    def train(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(forward(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return steps * arguments.batch / (time.perf_counter() - start)

    train(max(5, arguments.steps // 4))  # compiles, chooses cuDNN's kernels
    return [train(arguments.steps) for _ in range(arguments.repeats)]


def write_files(root: Path, images: int) -> None:
    """Write JPEG files of about 60 KB, as large as photographs of this size, for two classes."""
    draw = np.random.default_rng(0)
    for split, size in (("train", images), ("val", 64)):
        first: list[Path] = []
        for number in range(size):
            path = root / split / f"class{number % 2}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            if number < DIFFERENT:
                noise = Image.fromarray(draw.integers(0, 256, (375, 500, 3), dtype=np.uint8))
                noise.filter(ImageFilter.GaussianBlur(1)).save(path, quality=90)
                first.append(path)
            else:
                os.link(first[number % DIFFERENT], path)


def ours(arguments: argparse.Namespace, model: str, loop: str, folder: Path) -> list[str]:
    """Return the command of train.py, whose epochs are the rounds."""
    images = arguments.batch * arguments.steps
    data = ["data=synthetic", f"data.dataset.image_size={arguments.size}", f"data.dataset.train_size={images}"]
    data += ["data.dataset.test_size=64", "data.dataset.num_classes=1000"]
    if loop == "ours folder":
        write_files(folder / "images", images)
        data = ["data=folder", f"data.root={folder}/images", "data.cache=disk", f"data.cache_dir={folder}/cache"]
        data += [f"data.image_size={arguments.size}", f"data.num_workers={arguments.workers}"]
    return [
        *[sys.executable, "train.py", "model=torchvision", f"model.name={model}", *data, f"batch_size={arguments.batch}"],
        *["optimizer.lr=0.01", f"epochs={arguments.repeats + 1}", f"runs_dir={folder}", "name=run", *OURS[loop]],
        *["checkpoint.every_epochs=1000", "checkpoint.best=null"],
    ]


def measure(arguments: argparse.Namespace, model: str, loop: str) -> dict:
    """Run a loop in a process of its own, and return its row of the table."""
    row = {"model": model, "loop": loop, "batch": arguments.batch, "size": arguments.size}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = folder / "rates.json"
        command = [sys.executable, __file__, "--run", loop, "--models", model, "--json", str(found)]
        for key in ("batch", "steps", "repeats", "size"):
            command += [f"--{key}", str(getattr(arguments, key))]
        if loop in OURS:
            command = ours(arguments, model, loop, folder)
        try:
            subprocess.run(command, cwd=ROOT, check=True, timeout=arguments.patience, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            return row | {"skipped": error.stderr[-500:]}
        except subprocess.TimeoutExpired:
            return row | {"skipped": f"not done within {arguments.patience:.0f} s"}
        if loop in OURS:
            rates = [row["samples_per_second"] for row in read_epochs(folder / "run" / "metrics.jsonl")[1:]]
        else:
            rates = json.loads(found.read_text())
    return row | {"rate": statistics.median(rates), "rates": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"], help="names in torchvision.models")
    parser.add_argument("--loops", nargs="+", default=LOOPS, choices=LOOPS)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224, help="height and width of the images in pixels")
    parser.add_argument("--workers", type=int, default=8, help="worker processes of `ours folder`")
    parser.add_argument("--steps", type=int, default=50, help="steps of a round")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--patience", type=float, default=300, help="seconds that a loop may take")
    parser.add_argument("--json", default=os.devnull, help="file for the rates of all rounds")
    parser.add_argument("--run", choices=LOOPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        Path(arguments.json).write_text(json.dumps(reference(arguments, "compiled" in arguments.run)))
        return
    rows = []
    for model in arguments.models:
        for loop in arguments.loops:
            rows.append(measure(arguments, model, loop))
            print(f"{model:12} {loop:20} {rows[-1].get('skipped') or format(rows[-1]['rate'], '10,.0f')}", flush=True)
            Path(arguments.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
