"""A trained run, opened from its directory: the config with overrides, what the data look like, the weights of a checkpoint."""

import json
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from yaml import YAMLError

from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.config.schema import CheckpointConfig, RunConfig
from ddp_lab.data.datasets import Dataset
from ddp_lab.launch.command_line import CONF, compose_config
from ddp_lab.models.own import build_model
from ddp_lab.observe.logger import log
from ddp_lab.resilience.checkpoint_files import load_checkpoint
from ddp_lab.resilience.checkpoint_folder import best_in, damage_of, steps_in
from ddp_lab.resilience.run_directory import read_json, write_json
from ddp_lab.resilience.sharded_files import is_sharded
from ddp_lab.resilience.sharded_read import ShardedCheckpoint
from ddp_lab.training.progress import Progress
from ddp_lab.world.runtime import Runtime

DATA = "data.json"
# Keys of a launch that trains, with their values afterwards.
AFTERWARDS = {"resume": "never", "inject": None, "profile": False, "cuda_graph": False, "compile": False, "model.weights": None}


@dataclass(frozen=True)
class DataRecord:
    """What a model needs to know of the data that it was trained on, from data.json. The data themselves may be elsewhere.

    Attributes:
        shape: the arguments of the model that follow from the data: in_channels, image_size and num_classes.
        classes: the names of the classes, in the order of the logits.
        digest: hash of the list of files; empty for datasets that are not lists of files.
    """

    shape: dict[str, int]
    classes: list[str]
    digest: str = ""


def record_data(folder: Path, dataset: Dataset) -> None:
    """Write data.json to a run directory."""
    write_json(folder / DATA, asdict(DataRecord(dataset.model_shape(), dataset.classes, dataset.digest)))


def read_data(folder: Path) -> DataRecord:
    """Read data.json from a run directory.

    Raises:
        ConfigError: it is missing or damaged.
    """
    record = find_data(folder)
    if record is None:
        raise ConfigError(
            f"{folder}: {DATA} is missing or damaged; start the run again with name={folder.name}, which writes the "
            "file, also if it is finished"
        )
    return record


def find_data(folder: Path) -> DataRecord | None:
    """Return the content of data.json; None if it is missing or damaged."""
    record = read_json(folder / DATA)
    if not isinstance(record, dict) or not {"shape", "classes"} <= record.keys() <= DataRecord.__annotations__.keys():
        return None
    return DataRecord(**record)


def compare_data(folder: Path, dataset: Dataset) -> str | None:
    """Compare a dataset with that of a run, if the run has recorded it. Return a warning if it consists of other files.

    Raises:
        ConfigError: its classes are others, or have another order, so that its labels are not those of the model.
    """
    record = find_data(folder)
    if record is None:
        return None
    pairs = zip_longest(record.classes, dataset.classes, fillvalue="missing")
    if different := [(number, then, now) for number, (then, now) in enumerate(pairs) if then != now]:
        number, then, now = different[0]
        raise ConfigError(
            f"{folder}: was trained with other classes: number {number} of {len(record.classes)} was {then}, in these data it "
            f"is {now}. Use data with the same classes in the same order; to train on others, begin a run with another name"
        )
    if record.digest and dataset.digest and record.digest != dataset.digest:
        return f"{folder}: was trained on another list of files than these data; the order of the samples is another one"
    return None


def read_config(folder: Path, overrides: list[str], config_dir: str | None) -> DictConfig:
    """Return the config of a run with overrides: choices of a group replace the whole group, other keys are set.

    Args:
        folder: the run directory.
        overrides: Hydra overrides.
        config_dir: directory of further yaml, as in --config-dir.

    Raises:
        ConfigError: the directory contains no readable config, or the config with the overrides is not allowed.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(
            f"{folder}: is not the directory of a run: there is no {path}. Use a directory in runs_dir, runs/NAME"
        )
    try:
        cfg = OmegaConf.load(path)
        if not isinstance(cfg, DictConfig):
            raise ConfigError(f"{path}: must be a config, got a list")
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a config ({' '.join(str(error).split())})") from None
    add_new_keys(cfg)
    groups = {entry.name for entry in CONF.iterdir() if entry.is_dir() and entry.name in cfg}
    choices = [override for override in overrides if override.partition("=")[0] in groups]
    if choices:
        composed = compose_config(choices, config_dir)
        for group in (choice.partition("=")[0] for choice in choices):
            cfg[group] = OmegaConf.to_container(composed[group])  # with its references, which now refer to the run's keys
    others = [override for override in overrides if override not in choices]
    for override in OverridesParser.create().parse_overrides(others):
        if override.is_delete() or override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: must be of the form key=value")
        OmegaConf.update(cfg, override.key_or_group, override.value(), force_add=True)
    for key, value in AFTERWARDS.items():
        OmegaConf.update(cfg, key, value)
    check(cfg)
    return cfg


def add_new_keys(cfg: DictConfig) -> None:
    """Set the keys that the version of ddp_lab that wrote a config did not have to their defaults, which do what it did."""
    missing = RunConfig.model_fields.keys() - cfg.keys() - {"data", "model"}
    if missing or CheckpointConfig.model_fields.keys() - cfg.checkpoint.keys():
        defaults = cast("dict[str, Any]", OmegaConf.to_container(compose_config([], None)))
        OmegaConf.update(cfg, "checkpoint", defaults["checkpoint"] | dict(cfg.get("checkpoint", {})))
        for key in missing:
            cfg[key] = defaults[key]


def find_checkpoint(folder: Path, choice: str, runtime: Runtime) -> str:
    """Return the path of a checkpoint of a run. Collective.

    Args:
        folder: the run directory.
        choice: "last" is the newest valid one; newer ones that are damaged are logged. "best" is the best one. Else a path.

    Raises:
        ConfigError: there is no such checkpoint, or it is a damaged sharded one.
    """
    if choice not in ("last", "best"):
        if not (is_sharded(choice) or Path(choice).is_file()):
            raise ConfigError(f"--checkpoint {choice}: must be last, best or the path of a checkpoint; there is no such file")
        if is_sharded(choice) and (problem := damage_of(Path(choice), runtime)):
            raise ConfigError(f"--checkpoint {choice}: the checkpoint is damaged: {problem}. Use another checkpoint")
        return choice
    find = steps_in if choice == "last" else best_in
    found: list[str] = json.loads(
        runtime.agree("checkpoints", lambda: json.dumps([str(path) for path in find(folder / "checkpoints")]))
    )
    for path in reversed(found):
        if (problem := damage_of(Path(path), runtime)) is None:
            return path
        if runtime.rank == 0:
            log.warning(f"{path} is damaged ({problem})")
    pattern = "step_*.pt" if choice == "last" else "best.pt"
    raise ConfigError(f"--checkpoint {choice}: {folder / 'checkpoints'} contains no {'valid ' * bool(found)}{pattern}")


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
    return state.get("ema", state["model"]), Progress(**state["progress"])


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
    return Progress(**saved.state["progress"])


def load_model(folder: Path, cfg: DictConfig, checkpoint: str) -> nn.Module:
    """Return the complete model of a run on the CPU in evaluation mode, with the weights of a checkpoint. It needs no data."""
    model = build_model(cast("dict[str, Any]", cfg.model), read_data(folder).shape)
    model.load_state_dict(read_weights(model, checkpoint)[0])
    return model.eval()
