"""A trained run: its config, what it has recorded of its data, and the model with the weights of one of its checkpoints."""

from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig
from torch import nn

from ddp_lab.checkpoints.find import find_checkpoint, open_checkpoint
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.make import build_model
from ddp_lab.run.data_record import DataRecord, find_data, read_data
from ddp_lab.run.recorded_config import read_config
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
    model.load_state_dict(saved.weights())
    return TrainedRun(cfg, data, path, model.eval())
