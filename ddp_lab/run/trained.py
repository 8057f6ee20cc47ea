"""A trained run: one of its checkpoints, opened in one process without data, or evaluated under any strategy."""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig
from torch import nn

from ddp_lab.checkpoints.find import find_checkpoint, open_checkpoint
from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.preflight import check_network
from ddp_lab.models.make import build_model
from ddp_lab.observe.log import log, telling
from ddp_lab.run.data_record import DataRecord, compare_data, find_data, read_data
from ddp_lab.run.job import build
from ddp_lab.run.recorded_config import read_config
from ddp_lab.training.metrics import evaluate
from ddp_lab.training.not_finite import NotFiniteNotes
from ddp_lab.training.progress import Progress
from ddp_lab.training.trainer import place
from ddp_lab.world.device import float32_matmul
from ddp_lab.world.runtime import Runtime


class TrainedRun(NamedTuple):
    """A trained run: its config, its data, the path of a checkpoint, and the full model in evaluation mode on the CPU."""

    cfg: DictConfig
    data: DataRecord
    checkpoint: Path
    model: nn.Module


def checkpoint_of(folder: Path, choice: str, runtime: Runtime) -> Path:
    """Return a checkpoint of a run. Collective.

    Args:
        folder: the run directory.
        choice: as in `find_checkpoint`.
        runtime: the ranks.

    Raises:
        ConfigError: there is no such checkpoint, or it is damaged.
    """
    if choice not in ("auto", "last", "best") and not Path(choice).exists():
        raise ConfigError(f"--checkpoint {choice}: must be auto, last, best or the path of a checkpoint; there is no such file")
    record = find_data(folder)
    criterion = record.criterion if record else None
    found = find_checkpoint(folder / "checkpoints", choice, runtime, criterion, key="--checkpoint ")
    if found is None:
        name = "best" if choice == "best" else "step_*"
        raise ConfigError(f"--checkpoint {choice}: {folder}/checkpoints contains no {name}.pt and no {name}.sharded")
    return found


def open_run(folder: Path, choice: str) -> TrainedRun:
    """Open a trained run in one process. It needs no data.

    Args:
        folder: the run directory.
        choice: its checkpoint, as in `find_checkpoint`.

    Raises:
        ConfigError: the directory is not that of a run, or the file is not a checkpoint of its model.
    """
    cfg, data = read_config(folder), read_data(folder)
    path = checkpoint_of(folder, choice, Runtime("cpu"))
    model = build_model(cast("dict[str, Any]", cfg.model), data.shape)
    saved = open_checkpoint(path, key="--checkpoint ")
    saved.check({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    saved.load_weights(model.state_dict())
    return TrainedRun(cfg, data, path, model.eval())


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
    place(job.strategy, job.model, job.task, job.options.channels_last)
    saved.load_weights(job.strategy.module.state_dict())
    slow = telling("evaluating", partial(print, file=sys.stderr)) if runtime.rank == 0 else nullcontext()
    with float32_matmul(cfg.float32_matmul), slow:
        metrics = evaluate(job.strategy, job.loaders[split])
    NotFiniteNotes(runtime.rank == 0).check(metrics, split)
    progress = Progress.of(saved.state["progress"])
    epoch = progress.epoch - (progress.samples == 0)  # the last one that it has been trained in, at least in part
    found = {"checkpoint": str(path), "epoch": epoch, "step": progress.step, "samples": metrics.samples}
    return found | metrics.metrics(split) | {"where": job.strategy.where}
