"""The model of a trained run, with the weights of one of its checkpoints."""

import json
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import DictConfig
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.make import build_model
from ddp_lab.observe.log import log
from ddp_lab.resilience.checkpoint_files import load_checkpoint
from ddp_lab.resilience.checkpoint_folder import best_in, damage_of, progress_in, steps_in
from ddp_lab.resilience.sharded_files import is_sharded
from ddp_lab.resilience.sharded_read import ShardedCheckpoint
from ddp_lab.run.data_record import DataRecord, find_data, read_data
from ddp_lab.training.progress import Progress
from ddp_lab.world.runtime import Runtime


def find_checkpoint(folder: Path, choice: str, runtime: Runtime) -> str:
    """Return the path of a checkpoint of a run. Collective.

    Args:
        folder: the run directory.
        choice: "last" is the newest valid one; newer ones that are damaged are logged. "best" is the best one. "auto" is the
            best one if the run's criterion chose it, else the newest. Else a path.

    Raises:
        ConfigError: there is no such checkpoint, or it is a damaged sharded one.
    """
    if choice not in ("auto", "last", "best"):
        if not (is_sharded(choice) or Path(choice).is_file()):
            raise ConfigError(
                f"--checkpoint {choice}: must be auto, last, best or the path of a checkpoint; there is no such file"
            )
        if is_sharded(choice) and (problem := damage_of(Path(choice), runtime)):
            raise ConfigError(f"--checkpoint {choice}: the checkpoint is damaged: {problem}. Use another checkpoint")
        return choice
    checkpoints, record = folder / "checkpoints", find_data(folder)
    criterion = record.criterion if record else DataRecord.criterion
    found: list[str] = json.loads(runtime.agree("checkpoints", lambda: json.dumps(candidates(checkpoints, choice))))
    for path in found:
        if (problem := damage_of(Path(path), runtime)) is None:
            if choice != "auto" or not Path(path).name.startswith("best") or progress_in(Path(path)).is_best(criterion):
                return path
        elif runtime.rank == 0:
            log.warning(f"{path} is damaged ({problem})")
    choice = "last" if choice == "auto" else choice
    name = "step_*" if choice == "last" else "best"
    valid = "valid " * bool(found)
    raise ConfigError(f"--checkpoint {choice}: {checkpoints} contains no {valid}{name}.pt and no {valid}{name}.sharded")


def candidates(folder: Path, choice: str) -> list[str]:
    """Return the paths of the checkpoints for a `choice` as in `find_checkpoint`, in the order in which they are tried."""
    best = best_in(folder) if choice != "last" else []
    newest = steps_in(folder) if choice != "best" else []
    return [*map(str, reversed(best)), *map(str, reversed(newest))]


def read_weights(model: nn.Module, path: str) -> tuple[dict[str, torch.Tensor], Progress]:
    """Return the weights of a checkpoint, or their averages, and its position in the training.

    Args:
        model: the complete model; only the shapes of its tensors matter.
        path: the checkpoint, as from `find_checkpoint`.

    Raises:
        ConfigError: the file is damaged, or is not a checkpoint of this model.
    """
    weights = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if is_sharded(path):
        weights = {name: torch.empty_like(tensor, device="cpu") for name, tensor in weights.items()}
        return weights, read_shards(weights, path, shapes)
    state = load_checkpoint(path, shapes, key="--checkpoint ")
    return state.get("ema", state["model"]), Progress.of(state["progress"])


def read_shards(weights: dict[str, torch.Tensor], path: str, shapes: dict[str, tuple[int, ...]]) -> Progress:
    """Read the weights of a sharded checkpoint, or their averages, in place, and return its position in the training.

    Args:
        weights: this rank's part of the model by name, also DTensors.
        path: as from `find_checkpoint`.
        shapes: the shape of each tensor of the complete model.

    Raises:
        ConfigError: it is not a checkpoint of this model.
    """
    saved = ShardedCheckpoint(path, key="--checkpoint ")
    saved.check(shapes)
    saved.read(saved.weights(weights))
    return Progress.of(saved.state["progress"])


def load_model(folder: Path, cfg: DictConfig, checkpoint: str) -> nn.Module:
    """Return the complete model of a run on the CPU in evaluation mode, with the weights of a checkpoint. It needs no data."""
    model = build_model(cast("dict[str, Any]", cfg.model), read_data(folder).shape)
    model.load_state_dict(read_weights(model, checkpoint)[0])
    return model.eval()
