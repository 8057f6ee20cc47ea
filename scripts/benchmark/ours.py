"""Our loop: the overrides of train.py, and the captured step of `ours` without the loop around it."""

from argparse import Namespace
from collections.abc import Iterator

import torch
from benchmark.plain import wait
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from ddp_lab.launch.command_line import CONF
from ddp_lab.run.job import prepare
from ddp_lab.run.materialize import materialize
from ddp_lab.training.speed.cuda_graph import GraphStep
from ddp_lab.world.runtime import Runtime

FASTEST = ["cuda_graph=true", "compile=true", "channels_last=true", "precision=bf16"]
AUTO = ["speed=auto"]
ON_GPU = {"ours eager": ["speed=off"], "ours auto": AUTO, "ours auto bf16": [*AUTO, "precision=bf16"], "ours": FASTEST}
ON_CPU = {loop: ["speed=off"] for loop in ON_GPU} | {"ours": ["compile=true"]}


def overrides(model: str, strategy: str, arguments: Namespace, ranks: int, performance: list[str]) -> list[str]:
    """Return the overrides of train.py for a run on made-up images; a strategy may be scratch-ALGORITHM."""
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


def kernels(name: str, runtime: Runtime, arguments: Namespace) -> Iterator[float]:
    """Replay the captured step of `ours` on the first batches, and yield images per second."""
    strategy_name = arguments.strategy if runtime.world_size > 1 else "single"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides(name, strategy_name, arguments, runtime.world_size, FASTEST))
    OmegaConf.resolve(cfg)
    runtime.precision = cfg.precision
    job = prepare(cfg, runtime)
    with job.options.switches(runtime):
        training = materialize(job)
        training.compile(arguments.steps)
        loader, step = job.loaders["train"], training.step
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
