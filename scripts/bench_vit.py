"""Benchmark the strategies on the work for which each of them is made: Vision Transformers on up to two GPUs.

python scripts/bench_vit.py throughput giant small_batch slow_link resnet --json runs/bench_vit.jsonl
python scripts/bench_vit.py slow_link --only 'ddp|pipeline' --override compile=true

throughput    ViT-S/16, B/16 and L/16 at 224 px, bf16, compiled, on one GPU; L/16 on two under ddp and fsdp
giant         a ViT of `--depth` blocks of 201 million parameters (default: 48, 9.7 billion) with AdamW under fsdp, mesh and ddp
small_batch   global batches of 1 and 4 images of 1,024 px: ViT-H/16 under mesh with tp=2 against one GPU
slow_link     ViT-L/16 under ddp, fsdp, pipeline and mesh with pp=2 through the host's memory; ddp and pipeline by the fast link
resnet        ResNet-18 at 28 px under single, ddp, fsdp and pipeline, eager and compiled

Every line of the table is a launch of train.py on made-up images that are on the device. The first 16 steps compile, warm up
and are profiled; the throughput is the median of the `--rounds` epochs of 8 steps after them. A launch is killed after its last
round, because the checkpoint at the end of training would take longer. `peak` is the share of the 989 TFLOP/s that an H100 or
an H200 computes in bf16 without sparsity, for 6 FLOPs per parameter and token and those of the attention, forward and backward.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.models.vit import vit  # noqa: E402
from ddp_lab.observe.metrics_file import read_epochs  # noqa: E402

STEPS, WARM_UP = 8, 2  # steps of an epoch; epochs, which contain the 16 steps that profile=true needs
PEAK = 989e12  # FLOP/s of one GPU
SLOW = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "0"}
COMPILED = "compile=true"  # where the strategy does not support it, the run logs that


class Launch(NamedTuple):
    """One launch of train.py.

    Attributes:
        name: what the table calls it.
        gpus: number of ranks.
        batch: global batch.
        size: height and width of an image, in pixels.
        overrides: Hydra overrides.
        environment: environment variables.
    """

    name: str
    gpus: int
    batch: int
    size: int
    overrides: list[str]
    environment: dict[str, str] = {}


def transformer(model: str, *overrides: str) -> list[str]:
    return [f"model={model}", "optimizer=adamw", "optimizer.fused=true", "optimizer.lr=1e-4", "precision=bf16", *overrides]


def throughput(depth: int) -> list[Launch]:
    """Return the launches of published sizes; on two GPUs with the same batch for each GPU."""
    batches = {"vit_s16": 1024, "vit_b16": 512, "vit_l16": 256}
    alone = [Launch(f"{model} single", 1, batch, 224, transformer(model, COMPILED)) for model, batch in batches.items()]
    two = {strategy: transformer("vit_l16", COMPILED, f"strategy={strategy}") for strategy in ("ddp", "fsdp")}
    return alone + [Launch(f"vit_l16 {strategy}", 2, 512, 224, overrides) for strategy, overrides in two.items()]


def giant(depth: int) -> list[Launch]:
    """Return the launches of a model whose training state does not fit on one GPU."""
    model = ["model.patch_size=16", "model.width=4096", "model.heads=32", f"model.depth={depth}"]
    less = [COMPILED, "strategy.checkpoint_activations=block"]
    chosen = {"fsdp": less, "mesh": [*less, "strategy.shard=2"], "ddp": []}
    return [
        Launch(f"giant {name}", 2, 128, 224, transformer("vit", *model, f"strategy={name}", *overrides))
        for name, overrides in chosen.items()
    ]


def small_batch(depth: int) -> list[Launch]:
    """Return the launches of a batch that is too small to be divided."""
    model = transformer("vit_h14", "model.patch_size=16", COMPILED)
    chosen = {"single": (1, []), "tp": (2, ["strategy=mesh", "strategy.tp=2", "strategy.sequence_parallel=true"])}
    return [
        Launch(f"vit_h16 {name} batch {batch}", gpus, batch, 1024, [*model, *overrides])
        for name, (gpus, overrides) in chosen.items()
        for batch in (1, 4)
    ]


def slow_link(depth: int) -> list[Launch]:
    """Return the launches with gradients that are much larger than the activations at a cut."""
    chosen = {name: [f"strategy={name}"] for name in ("ddp", "fsdp", "pipeline")} | {"mesh": ["strategy=mesh", "strategy.pp=2"]}
    links = {"slow": (SLOW, list(chosen)), "fast": ({}, ["ddp", "pipeline"])}
    return [Launch("vit_l16 single", 1, 128, 224, transformer("vit_l16"))] + [
        Launch(f"vit_l16 {name} {link}", 2, 128, 224, transformer("vit_l16", *chosen[name]), environment)
        for link, (environment, names) in links.items()
        for name in names
    ]


def resnet(depth: int) -> list[Launch]:
    """Return the launches of a small model."""
    return [
        Launch(
            *(f"resnet18 {name} compile={compile}", 1 if name == "single" else 2, 1024, 28),
            ["model=resnet18", "data.dataset.channels=1", "optimizer.lr=0.01", f"strategy={name}", f"compile={compile}"],
        )
        for name in ("single", "ddp", "fsdp", "pipeline")
        for compile in ("false", "true")
    ]


PARTS = {part.__name__: part for part in (throughput, giant, small_batch, slow_link, resnet)}


def run(launch: Launch, arguments: argparse.Namespace, folder: Path) -> str:
    """Run a launch until its last round is done, and return its output."""
    data = ["data=synthetic", f"data.dataset.image_size={launch.size}", "data.dataset.test_size=8"]
    data += [f"data.dataset.train_size={STEPS * launch.batch}", f"batch_size={launch.batch}"]
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={launch.gpus}"] if launch.gpus > 1 else []
    rounds = WARM_UP + arguments.rounds
    command = [sys.executable, *start, "train.py", *data, *launch.overrides, "profile=true", f"epochs={rounds + 1}"]
    # Nothing is saved: a checkpoint of the largest model has 116 GB.
    command += [
        f"runs_dir={folder}",
        "name=run",
        "checkpoint.every_epochs=1000",
        "checkpoint.best=null",
        "checkpoint.on_error=continue",
    ]
    output, metrics = folder / "output", folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + arguments.patience
    with output.open("w") as file:
        # torchrun's ranks die with it (PR_SET_PDEATHSIG).
        environment = os.environ | launch.environment
        process = subprocess.Popen([*command, *arguments.override], cwd=ROOT, env=environment, stdout=file, stderr=file)
        while process.poll() is None and time.monotonic() < deadline:
            if len(read_epochs(metrics)) >= rounds:
                break
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
    return output.read_text()


def flops(config: dict[str, Any], size: int) -> tuple[int, float]:
    """Return the number of parameters of a Vision Transformer and the FLOPs of a training step for one image."""
    options = {key: config[key] for key in ("depth", "width", "heads", "mlp_ratio", "patch_size", "pool", "drop_path")}
    with torch.device("meta"):
        model = vit(3, size, 10, **options)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = (size // options["patch_size"]) ** 2
    return parameters, 6 * parameters * tokens + 12 * options["depth"] * tokens**2 * options["width"]


def measure(part: str, launch: Launch, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a launch and return its record."""
    record: dict[str, Any] = {"part": part, **launch._asdict(), "override": arguments.override}
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name), time.monotonic()
        output = run(launch, arguments, folder)
        record["seconds"] = round(time.monotonic() - start, 1)
        metrics, profile = folder / "run" / "metrics.jsonl", folder / "run" / "profile" / "summary.json"
        rows = read_epochs(metrics)[WARM_UP:]
        if len(rows) < arguments.rounds:
            said = [line for line in output.splitlines() if "out of memory" in line or line.startswith("error")]
            return record | {"failed": [*said, *output.splitlines()[-1:], "no output"][0], "output": output[-6000:]}
        record["batch"] = rows[0]["global_batch_size"]
        record["rates"] = [row["samples_per_second"] for row in rows]
        record["rate"] = statistics.median(record["rates"])
        found = json.loads(profile.read_text())
        record |= {key: found[key] for key in ("diagnosis", "peak_memory_bytes", "bytes_per_step", "rows")}
        record["log"] = [line for line in output.splitlines() if " on " in line or "disabled" in line]
        config = OmegaConf.to_container(OmegaConf.load(folder / "run" / "config.yaml"), resolve=True)
    if config["model"]["_target_"].endswith(".vit"):
        record["parameters"], each = flops(config["model"], config["data"]["dataset"]["image_size"])
        record["share_of_peak"] = record["rate"] * each / (launch.gpus * PEAK)
    return record


def row(record: dict[str, Any]) -> str:
    """Return a line of the table."""
    if "failed" in record:
        return f"{record['name']:32} failed after {record['seconds']:.0f} s: {record['failed'][:300]}"
    memory = " ".join(f"{size / 2**30:.1f}" for size in record["peak_memory_bytes"])
    share = f"{record['share_of_peak']:6.1%}" if "share_of_peak" in record else " " * 6
    verdict = " | ".join(record["diagnosis"])
    return f"{record['name']:32} {record['rate']:10,.1f} {share}  {memory:>12} GiB  {record['seconds']:4.0f} s  {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--only", default="", help="regular expression that the names of the launches must contain")
    parser.add_argument("--depth", type=int, default=48, help="blocks of the model of `giant`; 34 fit on two GPUs of 80 GB")
    parser.add_argument("--rounds", type=int, default=5, help="epochs of 8 steps that are measured")
    parser.add_argument("--patience", type=float, default=240, help="seconds that a launch may take")
    parser.add_argument("--json", type=Path, default=Path(os.devnull), help="file to which a record of each launch is appended")
    parser.add_argument("--override", nargs="+", default=[], help="further Hydra overrides of every launch")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: bench_vit.py needs a GPU, and none is visible")
    print(f"{'':32} {'images/s':>10} {'peak':>6}  {'memory':>16}  {'took':>6}", flush=True)
    for part in arguments.parts:
        for launch in PARTS[part](arguments.depth):
            if re.search(arguments.only, launch.name):
                record = measure(part, launch, arguments)
                print(row(record), flush=True)
                with arguments.json.open("a") as file:
                    file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
