"""The config of a run, as its directory and its trackers record it."""

import os
import re
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

CONFIG = "config.yaml"
RANKS = "number of ranks"
PASSWORD = re.compile(r"(?<=://)[^/@]+@")  # and the user, in a URL
# to another key, not a resolver such as ${oc.env:HOME} or ${now:%Y}
REFERENCE = re.compile(r"\$\{[\w.]+\}")


def to_record(cfg: DictConfig) -> str:
    """Return the config as YAML.

    Resolvers are replaced by their values, and references to other keys remain.

    A later override of `data.root` therefore also changes `data.dataset.root`, which refers to it.
    """
    raw = OmegaConf.to_container(cfg)
    resolved = OmegaConf.to_container(cfg, resolve=True)
    return OmegaConf.to_yaml(OmegaConf.create(_keep_references(raw, resolved)))


def text_of(config: str, ranks: int) -> str:
    """Return the content of config.yaml: a config as from `to_record`, and the number of ranks."""
    return f"# {RANKS}: {ranks}\n{config}"


def write_config(run_dir: Path, config: str, ranks: int) -> None:
    """Write the config of a run that begins to its directory. Arguments as in `text_of`."""
    replace_durably(run_dir / CONFIG, text_of(config, ranks))


def replace_durably(path: Path, text: str) -> None:
    """Write a text file so that it is never there in part, also after a machine has failed."""
    from ddp_lab.checkpoints.files import write_text  # loads torch, which readers do not need

    temporary = path.with_name(f".{path.name}")
    write_text(temporary, text)
    os.replace(temporary, path)


def without_secrets(config: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved config as trackers may upload it.

    Their own options, and users and passwords in URLs, are left out.
    """
    return {
        key: _without_passwords(value) for key, value in config.items() if key != "tracker_options"
    }


def _without_passwords(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_passwords(inner) for key, inner in cast("dict[str, Any]", value).items()
        }
    return PASSWORD.sub("", value) if isinstance(value, str) else value


def _keep_references(raw: Any, resolved: Any) -> Any:
    if isinstance(raw, dict):
        return {key: _keep_references(value, resolved[key]) for key, value in raw.items()}
    return raw if isinstance(raw, str) and REFERENCE.fullmatch(raw) else resolved
