"""The config of a run, as the commands after training read it from its directory."""

from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ddp_lab.checkpoints.files import is_sharded
from ddp_lab.config.build import plain
from ddp_lab.config.check import check, validate
from ddp_lab.config.compose import CONF
from ddp_lab.config.errors import ConfigError
from ddp_lab.config.moved import move_keys
from ddp_lab.config.schema import RunConfig
from ddp_lab.launchers.command_line import compose_config
from ddp_lab.launchers.recorded_config import CONFIG
from ddp_lab.launchers.run_names import refuse_unknown
from ddp_lab.world.process import env_int

# Keys of a launch that trains, with their values afterwards.
AFTERWARDS = {
    **{
        "resume": "never",
        "inject": None,
        "profile": False,
        "cuda_graph": False,
        "compile": False,
        "model.weights": None,
        "checkpoint_activations": "none",
        "callbacks": [],
    },
    **{"patience": None, "checkpoint.best": None, "optimize": "auto", "tracker": "none"},
}
# Options of strategies that lay out several ranks, with their values for one.
IN_ONE_PROCESS = {
    **{"shard": None, "tp": 1, "sequence_parallel": False},
    **{"pp": 1, "schedule": "gpipe", "cut": None},
}


def read_config(
    folder: Path, overrides: Sequence[str] = (), config_dir: str | None = None
) -> DictConfig:
    """Return the config of a run with overrides: choices replace the group, other keys are set.

    In one process the recorded strategy is laid out on one rank, with the overrides after that.

    Args:
        folder: the run directory.
        overrides: Hydra overrides.
        config_dir: directory of further yaml, as in --config-dir.

    Raises:
        ConfigError: the directory contains no readable config, or the config with the overrides is
            not allowed.
    """
    path = require_run(folder)
    try:
        cfg = OmegaConf.load(path)
        if not isinstance(cfg, DictConfig):
            raise ConfigError("must be a config, got a list")
        move_keys(cfg)
        for key, value in AFTERWARDS.items():
            OmegaConf.update(cfg, key, value)
        cfg.tracker_options = {}
        validate(RunConfig, plain(cfg))
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read as a config ({' '.join(str(error).split())})"
        ) from None
    except ConfigError as error:
        raise ConfigError(
            f"{path}: {error}. If another version of ddp_lab wrote it, use that version"
        ) from None

    if env_int("WORLD_SIZE", 1) == 1:
        cfg.strategy.update(
            {key: value for key, value in IN_ONE_PROCESS.items() if key in cfg.strategy}
        )
    groups = {entry.name for entry in CONF.iterdir() if entry.is_dir() and entry.name in cfg}
    choices = [override for override in overrides if override.partition("=")[0] in groups]
    if choices:
        composed = compose_config(choices, config_dir)
        for group in (choice.partition("=")[0] for choice in choices):
            # with its references, which now refer to the run's keys
            cfg[group] = OmegaConf.to_container(composed[group])

    others = [override for override in overrides if override not in choices]
    for override in OverridesParser.create().parse_overrides(others):
        if override.is_delete() or override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: must be of the form key=value")
        OmegaConf.update(cfg, override.key_or_group, override.value(), force_add=True)
    check(cfg)
    return cfg


def require_run(folder: Path) -> Path:
    """Return the path of a run's config.

    Raises:
        ConfigError: the directory is not that of a run.
    """
    path = folder / CONFIG
    if is_sharded(folder) or folder.suffix == ".pt":
        run = folder.parent.parent if folder.parent.name == "checkpoints" else "RUN"
        raise ConfigError(
            f"{folder}: is a checkpoint, and the directory of a run is needed. Use {run} "
            f"--checkpoint {folder}"
        )
    if not folder.is_dir():
        raise refuse_unknown(str(folder))
    if not path.is_file():
        raise ConfigError(
            f"{folder}: is not the directory of a run: there is no {path}. Use a name that "
            "`ddp-lab runs` lists, or the directory of a run in another runs_dir"
        )
    return path
