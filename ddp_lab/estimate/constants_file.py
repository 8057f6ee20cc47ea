"""The files of measured constants, one for each kind of card, in the user's cache directory."""

import json
import os
from dataclasses import asdict, fields
from pathlib import Path

from ddp_lab.config.errors import ConfigError
from ddp_lab.estimate.cards import Card
from ddp_lab.estimate.constants import Constants


def path_of(card: Card) -> Path:
    """Return the file of a card: $XDG_CACHE_HOME/ddp_lab/constants-NAME.json, by default in ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "ddp_lab" / f"constants-{card.name}.json"


def save(constants: Constants, card: Card) -> Path:
    """Write the constants of a card, and return the file.

    Raises:
        ConfigError: it cannot be written.
    """
    path = path_of(card)
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(constants), indent=1) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); set XDG_CACHE_HOME to another directory") from None
    return path


def load(card: Card) -> Constants | None:
    """Return the measured constants of a card; None if there are none.

    Raises:
        ConfigError: the file is damaged.
    """
    path = path_of(card)
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); remove it, or measure again with --calibrate") from None
    names = {field.name for field in fields(Constants)} - {"source"}
    if not isinstance(values, dict) or values.keys() != names | {"source"}:
        raise ConfigError(f"{path}: must have the keys source, {', '.join(sorted(names))}; measure again with --calibrate")
    if wrong := [name for name in names if not isinstance(values[name], int | float) or not values[name] >= 0]:
        raise ConfigError(f"{path}: {wrong[0]} must be a number of at least 0; measure again with --calibrate")
    return Constants(**values)
