"""The config as it is recorded in a run directory."""

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

REFERENCE = re.compile(r"\$\{[\w.]+\}")  # to another key, not a resolver such as ${oc.env:HOME} or ${now:%Y}


def to_record(cfg: DictConfig) -> str:
    """Return the config as YAML. Resolvers are replaced by their values, and references to other keys remain.

    A later override of `data.root` therefore also changes `data.dataset.root`, which refers to it.
    """
    raw, resolved = OmegaConf.to_container(cfg), OmegaConf.to_container(cfg, resolve=True)
    return OmegaConf.to_yaml(OmegaConf.create(_keep_references(raw, resolved)))


def _keep_references(raw: Any, resolved: Any) -> Any:
    if isinstance(raw, dict):
        return {key: _keep_references(value, resolved[key]) for key, value in raw.items()}
    return raw if isinstance(raw, str) and REFERENCE.fullmatch(raw) else resolved
