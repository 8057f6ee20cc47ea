"""The evaluation of a trained run under any strategy."""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ddp_lab.checkpoints.find import open_checkpoint
from ddp_lab.config.errors import ConfigError
from ddp_lab.lab.recipe import place
from ddp_lab.launchers.preflight import check_network
from ddp_lab.observe.log import log, telling
from ddp_lab.observe.metrics_file import describe_metrics
from ddp_lab.run.data_record import compare_data
from ddp_lab.run.job import build
from ddp_lab.run.trained import checkpoint_of
from ddp_lab.training.metrics import evaluate
from ddp_lab.training.progress import Progress
from ddp_lab.world.device import float32_matmul
from ddp_lab.world.runtime import Runtime


def evaluate_run(cfg: DictConfig, runtime: Runtime, folder: Path, checkpoint: str, split: str | None = None) -> dict[str, Any]:
    """Evaluate a checkpoint on a set of the config's data. Collective.

    Args:
        cfg: the run's config, with overrides.
        folder: the run directory.
        checkpoint: as in `find_checkpoint`.
        split: val or test; None: test or, if there is no test set, val.

    Returns:
        The metrics under the names that they have in metrics.jsonl, the checkpoint with its epoch and step, the number of
        samples, and the devices (where).

    Raises:
        ConfigError: the checkpoint, the data or the strategy cannot be used.
    """
    check_network(runtime)
    path = checkpoint_of(folder, checkpoint, runtime)
    job = build(cfg, runtime, with_weights=False)
    other = runtime.agree("data", partial(compare_data, folder, job.dataset, resumes=False))
    sets = list(job.dataset.evaluation_sets)
    split = split or sets[-1]
    if split not in sets:
        raise ConfigError(f"split={split}: must be {' or '.join(sets)}: these data have no other set to evaluate with")
    if other and split == "val" and runtime.rank == 0:
        log.warning(other)
    saved = open_checkpoint(path, key="--checkpoint ")
    saved.check(job.shapes)
    place(job.strategy, job.model, job.task, job.options)
    saved.load_weights(job.strategy)
    slow = telling("evaluating", partial(print, file=sys.stderr)) if runtime.rank == 0 else nullcontext()
    with float32_matmul(cfg.float32_matmul), slow:
        metrics = evaluate(job.strategy, job.loaders[split])
    progress = Progress.of(saved.state["progress"])
    epoch = progress.epoch - (progress.samples == 0)  # the last one that it has been trained in, at least in part
    found = {"checkpoint": str(path), "epoch": epoch, "step": progress.step, "samples": metrics.samples}
    return found | metrics.metrics(split) | {"where": job.strategy.where}


def describe(found: dict[str, Any]) -> str:
    """Return what `evaluate_run` has found in one line."""
    return (
        f"{found['checkpoint']}, epoch {found['epoch']}: {describe_metrics(found)} on {found['samples']:,} samples "
        f"({found['where']})"
    )
