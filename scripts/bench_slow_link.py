"""Find the bandwidth below which a pipeline beats data parallelism: two ranks on the CPU, in two network namespaces.

python scripts/bench_slow_link.py --json runs/slow_link.json          as root, with iproute2; about two minutes

A virtual cable connects the namespaces, and tc's token bucket (tbf) limits its bandwidth in both directions. Each strategy is
one launch of train.py, of a torchrun in each namespace; the limit changes between epochs. After a change, one epoch is
discarded and the next one measured. The model is a Vision Transformer of 10.7 million parameters, whose gradients are 110 times
as large as a batch's activations at a cut.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddp_lab.observe.metrics_file import read_epochs
from scripts.namespaces import ADDRESSES, cable

ROOT = Path(__file__).parent.parent
NAMES = ("ddp_lab_0", "ddp_lab_1")
DEPTH, WIDTH, TOKENS, BATCH, STEPS, PARTS = 6, 384, 16, 16, 3, 4
GRADIENTS = 4 * (12 * DEPTH * WIDTH**2)  # bytes of the blocks' parameters, without biases
ACTIVATIONS = 4 * BATCH * TOKENS * WIDTH  # bytes of a batch's tokens at a cut
WORK = ["model=vit", f"model.depth={DEPTH}", f"model.width={WIDTH}", "model.heads=6", f"batch_size={BATCH}", "device=cpu"]
WORK += ["data=synthetic", f"data.dataset.train_size={STEPS * BATCH}", "data.dataset.test_size=8", "optimizer.lr=0.01"]
WORK += ["checkpoint.every_epochs=1000", "checkpoint.best=null", "name=run"]
STRATEGIES = {"ddp": ["strategy=ddp"], "pipeline": ["strategy=pipeline", f"strategy.num_microbatches={PARTS}"]}


def limit(rate: float) -> None:
    """Limit the cable to `rate` Mbit/s in both directions."""
    burst = max(2**17, round(rate * 1e6 / 8 / 100))  # bytes; 10 ms, because the kernel's timer is not finer than 1 to 4 ms
    bucket = ["tbf", "rate", f"{rate}mbit", "burst", str(burst), "latency", "50ms"]
    for name in NAMES:
        subprocess.run(["tc", "-n", name, "qdisc", "replace", "dev", name, "root", *bucket], check=True)


def seconds_per_step(strategy: str, rates: list[float], patience: float) -> list[float]:
    """Return the seconds of a step at each bandwidth, of one launch.

    Args:
        patience: seconds that an epoch, or the start of the launch, may take.
    """
    with tempfile.TemporaryDirectory() as name:
        metrics, output = Path(name) / "run" / "metrics.jsonl", Path(name) / "output"
        words = [*WORK, *STRATEGIES[strategy], f"runs_dir={name}", f"epochs={2 * len(rates) + 2}"]
        start = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
        start += [f"--master_addr={ADDRESSES[0]}", "--master_port=29577"]
        with output.open("w") as file:
            nodes = [
                subprocess.Popen(
                    ["ip", "netns", "exec", device, *start, f"--node_rank={node}", "train.py", *words],
                    **{"cwd": ROOT, "stdout": file, "stderr": file, "env": os.environ | {"GLOO_SOCKET_IFNAME": device}},
                )
                for node, device in enumerate(NAMES)
            ]
        try:
            found: list[float] = []
            done = 0
            for rate in rates:
                limit(rate)
                seconds = wait_for(metrics, done + 2, patience, nodes, output)
                found.append(seconds[done + 1] / STEPS)
                done = len(seconds)
            return found
        finally:
            for node in nodes:  # their ranks die with them (PR_SET_PDEATHSIG)
                node.kill()
                node.wait()


def wait_for(metrics: Path, count: int, patience: float, nodes: list[subprocess.Popen], output: Path) -> list[float]:
    """Wait until `count` epochs are done, and return the seconds of all epochs so far."""
    deadline = time.monotonic() + 2 * patience
    while time.monotonic() < deadline and all(node.poll() is None for node in nodes):
        if len(rows := read_epochs(metrics)) >= count:
            return [row["seconds"] for row in rows]
        time.sleep(0.02)
    raise SystemExit(f"epoch {count} was not done in time:\n{output.read_text()[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[10_000, 2000, 1000, 500, 250, 100], help="Mbit/s")
    parser.add_argument("--patience", type=float, default=60, help="seconds that an epoch of 3 steps may take")
    parser.add_argument("--json", type=Path, default=Path(os.devnull), help="file for the seconds of a step")
    arguments = parser.parse_args()
    with cable(NAMES):
        found = {strategy: seconds_per_step(strategy, arguments.rates, arguments.patience) for strategy in STRATEGIES}
    arguments.json.write_text(json.dumps({"rates": arguments.rates, "seconds": found}))
    print(
        "| Mbit/s | ddp: s/step | gradients / bandwidth | pipeline: s/step | activations / bandwidth |\n|---|---|---|---|---|"
    )
    for rate, ddp, pipeline in zip(arguments.rates, *found.values(), strict=True):
        sent = [size * 8 / (rate * 1e6) for size in (GRADIENTS, 2 * ACTIVATIONS)]
        print(f"| {rate:,.0f} | {ddp:.2f} | {sent[0]:.2f} | {pipeline:.2f} | {sent[1]:.3f} |")
    pipeline, hidden = statistics.median(found["pipeline"]), found["ddp"][0]
    below = [GRADIENTS * 8 / seconds / 1e6 for seconds in (pipeline, max(pipeline - hidden, 1e-9))]
    print(f"predicted: the pipeline wins below {below[0]:,.0f} Mbit/s if ddp hides its all-reduce, {below[1]:,.0f} if not")


if __name__ == "__main__":
    main()
