"""A trained run: a checkpoint opened in one process without data, or evaluated under a strategy."""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from ddp_lab.checkpoints.find import find_checkpoint, open_checkpoint
from ddp_lab.config.errors import ConfigError, TrainingError
from ddp_lab.data.images import ImageOptions
from ddp_lab.observe.log import log, log_if_slow
from ddp_lab.run.data_record import DataRecord, compare_data, find_data
from ddp_lab.run.job import Job
from ddp_lab.tasks.base import Task
from ddp_lab.training.metrics import evaluate
from ddp_lab.training.not_finite import NotFiniteNotes
from ddp_lab.training.progress import Progress
from ddp_lab.world.runtime import Runtime


class InputFormat(NamedTuple):
    """How images become inputs of a model.

    Attributes:
        mean, std: of each channel of pixels in [0, 1], or one value for all.
        images: how images of Pillow are transformed; None: the dataset consists of tensors.
        is_fixed: whether all batches have samples of the same shape; False if `data.collate_fn`
            makes them.
    """

    mean: list[float]
    std: list[float]
    images: ImageOptions | None
    is_fixed: bool = True


class TrainedRun(NamedTuple):
    """A trained run.

    Attributes:
        data: what it was trained on.
        checkpoint: its path.
        model: the full model in evaluation mode on the CPU.
        task: what it was trained for.
        inputs: how images become inputs of the model.
        precision, float32_matmul: the keys of the config.
    """

    data: DataRecord
    checkpoint: Path
    model: nn.Module
    task: type[Task]
    inputs: InputFormat
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    float32_matmul: Literal["highest", "high"] = "highest"


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
        raise ConfigError(
            f"--checkpoint {choice}: must be auto, last, best or the path of a checkpoint; there "
            "is no such file"
        )

    record = find_data(folder)
    criterion = record.criterion if record else None
    checkpoint = find_checkpoint(
        folder / "checkpoints", choice, runtime, criterion, key="--checkpoint "
    )
    if checkpoint is None:
        name = "best" if choice == "best" else "step_*"
        raise ConfigError(
            f"--checkpoint {choice}: {folder}/checkpoints contains no {name}.pt and no "
            f"{name}.sharded"
        )
    return checkpoint


def load_trained(model: nn.Module, path: Path) -> nn.Module:
    """Give the full model of a run the weights of a checkpoint, and return it in evaluation mode.

    Raises:
        ConfigError: the file is not a checkpoint of this model.
    """
    saved = open_checkpoint(path, key="--checkpoint ")
    saved.check({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    saved.load_weights(model.state_dict())
    return model.eval()


def evaluate_job(job: Job, folder: Path, path: Path, split: str | None = None) -> dict[str, Any]:
    """Evaluate a checkpoint on a set of a job's data. Collective.

    Args:
        job: the run, with overrides of its config.
        folder: the run directory.
        path: the checkpoint.
        split: val or test; None: test or, if there is no test set, val.

    Returns:
        The metrics under the names that they have in metrics.jsonl, the checkpoint with its epoch
        and step, the number of samples, and the devices (where).

    Raises:
        ConfigError: the checkpoint, the data, the strategy or a metric cannot be used.
    """
    runtime = job.runtime
    other = runtime.broadcast_from_rank0(
        "data", partial(compare_data, folder, job.dataset, resumes=False)
    )
    sets = list(job.dataset.evaluation_sets)
    split = split or sets[-1]
    if split not in sets:
        raise ConfigError(
            f"split={split}: must be {' or '.join(sets)}: these data have no other set to evaluate "
            "with"
        )

    if other and split == "val" and runtime.is_main:
        log.warning(other)
    saved = open_checkpoint(path, key="--checkpoint ")
    saved.check(job.shapes)
    job.strategy.place(job.model, job.task, job.options.channels_last)
    saved.load_weights(job.strategy.module.state_dict())
    saved.load_loss(job.strategy)
    if runtime.is_main:
        slow = log_if_slow("evaluating", partial(print, file=sys.stderr))
    else:
        slow = nullcontext()

    with slow:
        try:
            metrics = evaluate(job.strategy, job.loaders[split], metrics=job.metrics)
        except TrainingError as error:  # no training has failed: something does not fit the data
            raise ConfigError(str(error)) from None
    NotFiniteNotes(runtime.is_main).check({split: metrics})
    progress = Progress.of(saved.state["progress"])
    # the last one that it has been trained in, at least in part
    epoch = progress.epoch - (progress.samples == 0)
    row = {
        "checkpoint": str(path),
        "epoch": epoch,
        "step": progress.step,
        "samples": metrics.samples,
    }
    return row | metrics.metrics(split) | {"where": job.strategy.where}
