"""Changes of a config, for what compares several: plans and measurements."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf, open_dict

from ddp_lab.config.build import Config


def changed(cfg: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of a config with other values of some keys."""
    return cast("Config", OmegaConf.merge(cfg, dict(values)))


def load_yaml(path: Path) -> Config:
    """Return the config in a YAML file."""
    return cast("Config", OmegaConf.load(path))


def as_config(values: dict[str, Any]) -> Config:
    """Return values as a config."""
    return OmegaConf.create(values)


def with_references(cfg: Config) -> dict[str, Any]:
    """Return a config as values, of which some refer to others."""
    return cast("dict[str, Any]", OmegaConf.to_container(cfg))


def text_without(cfg: Config, keys: Collection[str]) -> str:
    """Return a config as YAML, without some of its keys."""
    return OmegaConf.to_yaml(
        OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in keys])
    )


def remove(cfg: Config, key: str) -> None:
    """Remove a key from a config."""
    with open_dict(cfg):
        del cfg[key]
