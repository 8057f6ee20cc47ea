"""Which options of a config group have a key that the chosen option lacks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from ddp_lab.config.compose import CONF


def explain_elsewhere(key: str, config_dir: str | None = None) -> str:
    """Return which options of a group have a key, as the end of a sentence; "" if none has it.

    Args:
        key: Dotted, such as strategy.tp; or the name alone, tp, which may lack its group.
        config_dir: The directory of the user's own yaml, if there is one.
    """
    group, _, path = key.partition(".")
    if path:
        options = options_with(group, path, config_dir)
        return f"{_listed(group, options)} it; " if options else ""

    for name in sorted(entry.name for entry in CONF.iterdir() if entry.is_dir()):
        options = options_with(name, key, config_dir)
        if options and name not in ("experiment", "hydra"):
            return f"did you mean {name}.{key}? {_listed(name, options)} it; "
    return ""


def options_with(group: str, path: str, config_dir: str | None = None) -> list[str]:
    """Return the names of a group's options that set a key.

    Args:
        group: A folder of conf/.
        path: Dotted key within the group.
        config_dir: The directory of the user's own yaml, if there is one.
    """
    roots = [CONF, *([] if config_dir is None else [Path(config_dir)])]
    files = [file for root in roots for file in sorted((root / group).glob("*.yaml"))]
    return [file.stem for file in files if _sets(yaml.safe_load(file.read_text()), path)]


def _sets(node: Any, path: str) -> bool:
    for name in path.split("."):
        if not isinstance(node, dict) or name not in node or name.startswith("_"):
            return False
        node = cast("Mapping[str, Any]", node)[name]
    return True


def _listed(group: str, options: list[str]) -> str:
    """Return options as the subject of a sentence, with its verb."""
    names = [f"{group}={option}" for option in options]
    if len(names) == 1:
        return f"{names[0]} has"
    return f"{', '.join(names[:-1])} and {names[-1]} have"
