"""The choice of trackers: the class that each name stands for, and its options."""

from collections.abc import Mapping, Sequence
from functools import reduce
from importlib.util import find_spec
from typing import Any

from ddp_lab.config.build import find_target, options
from ddp_lab.config.check import unknown_key, validate
from ddp_lab.config.errors import ConfigError
from ddp_lab.config.types import TRACKERS

EXTRAS = ("wandb", "mlflow")  # packages that an extra of the same name installs
METHODS = ("log_metrics", "log_media", "finish")


def chosen_trackers(tracker: str | Sequence[str], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return `_target_` and the options of each chosen tracker, by name.

    Args:
        tracker: the key `tracker`.
        given: the key `tracker_options`. The options of mine.Tracker are in it as {"mine": {"Tracker": {...}}}.
    """
    names = [tracker] if isinstance(tracker, str) else tracker
    return {
        name: {"_target_": TRACKERS.get(name, name), **reduce(lambda node, part: node.get(part, {}), name.split("."), given)}
        for name in names
        if name != "none"
    }


def check_trackers(tracker: str | Sequence[str], given: Mapping[str, Any]) -> None:
    """Check that the chosen trackers can be constructed.

    Raises:
        ConfigError: a package is missing, a class does not exist or is not a tracker, or an option is not allowed.
    """
    chosen = chosen_trackers(tracker, given)
    known = [*TRACKERS, *(name.partition(".")[0] for name in chosen if name not in TRACKERS)]
    for name in given:
        if name not in known:
            raise ConfigError(unknown_key(f"tracker_options.{name}", given[name], "tracker_options.", known))
    for name, node in chosen.items():
        if name in EXTRAS and find_spec(name) is None:
            raise ConfigError(f"tracker={name}: needs the package {name}. Use pip install 'ddp_lab[{name}]', or tracker=none")
        target = find_target("tracker", node["_target_"])
        if missing := [method for method in METHODS if isinstance(target, type) and not hasattr(target, method)]:
            raise ConfigError(
                f"tracker={name}: the class has no method {' and no '.join(missing)}; a tracker has {', '.join(METHODS)}, as "
                "ddp_lab.observe.trackers.base.Tracker"
            )
        group = f"tracker_options.{name}"
        validate(options(group, node), {key: value for key, value in node.items() if key != "_target_"}, f"{group}.")
