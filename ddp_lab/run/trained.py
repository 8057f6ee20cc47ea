"""The model of a trained run, with the weights of one of its checkpoints."""

from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig
from torch import nn

from ddp_lab.checkpoints.find import find_checkpoint, open_checkpoint
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.make import build_model
from ddp_lab.run.data_record import DataRecord, find_data, read_data
from ddp_lab.world.runtime import Runtime


def checkpoint_of(folder: Path, choice: str, runtime: Runtime) -> Path:
    """Return a checkpoint of a run. Collective.

    Args:
        folder: the run directory.
        choice: as in `find_checkpoint`.

    Raises:
        ConfigError: there is no such checkpoint, or it is damaged.
    """
    if choice not in ("auto", "last", "best") and not Path(choice).exists():
        raise ConfigError(f"--checkpoint {choice}: must be auto, last, best or the path of a checkpoint; there is no such file")
    record = find_data(folder)
    criterion = record.criterion if record else DataRecord.criterion
    found = find_checkpoint(folder / "checkpoints", choice, runtime, criterion, key="--checkpoint ")
    if found is None:
        name = "best" if choice == "best" else "step_*"
        raise ConfigError(f"--checkpoint {choice}: {folder}/checkpoints contains no {name}.pt and no {name}.sharded")
    return found


def load_model(folder: Path, cfg: DictConfig, path: Path) -> nn.Module:
    """Return the full model of a run on the CPU in evaluation mode, with the weights of a checkpoint. It needs no data.

    Args:
        folder: the run directory.
        cfg: its config.
        path: as from `checkpoint_of`.

    Raises:
        ConfigError: the file is not a checkpoint of this model.
    """
    model = build_model(cast("dict[str, Any]", cfg.model), read_data(folder).shape)
    saved = open_checkpoint(path, key="--checkpoint ")
    saved.check({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    model.load_state_dict(saved.weights())
    return model.eval()
