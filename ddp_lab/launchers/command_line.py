"""The config of a command line, and messages for overrides that Hydra rejects."""

import argparse
import re
import shlex
from collections.abc import Collection
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig

from ddp_lab.config.build import GROUPS, options
from ddp_lab.config.check import unknown_key
from ddp_lab.config.errors import ConfigError

CONF = Path(__file__).parents[1] / "conf"  # in a clone a link to conf/ at the top level, in a wheel the files


def quote_faults(arguments: list[str]) -> list[str]:
    """Return the arguments with the value of `inject` in quotes: Hydra would read its comma as a sweep over two values."""
    return [re.sub(r"^inject=(\w+@[\w=,]+)$", r'inject="\1"', argument) for argument in arguments]


def split_config_dir(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the value of Hydra's option --config-dir, the directory of the user's own yaml, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir")
    known, others = parser.parse_known_args(arguments)
    return known.config_dir, others


def compose_config(overrides: list[str], config_dir: str | None, with_choices: bool = False) -> DictConfig:
    """Return the config of a command line: conf/, the groups in `config_dir` if it is given, and the overrides.

    Args:
        with_choices: whether the key `hydra` is kept, of which `runtime.choices` has the chosen option of each group.

    Raises:
        ConfigError: there is no such directory.
    """
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir}: there is no such directory. Use the directory of your own yaml")
    search = [] if config_dir is None else [f"hydra.searchpath=[{quote(f'file://{Path(config_dir).resolve()}')}]"]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=[*search, *overrides], return_hydra_config=with_choices)


def quote(value: str, mark: str = "'") -> str:
    """Quote a value for Hydra's grammar, in which commas and equal signs, and backslashes before a quote, are special.

    Args:
        mark: the kind of quotes, ' or ".
    """
    escaped = re.sub(rf"(\\*)({mark}|\Z)", lambda found: 2 * found[1] + found[2].replace(mark, f"\\{mark}"), value)
    return f"{mark}{escaped}{mark}"


def explain(error: Exception, arguments: list[str]) -> str:
    """Return a one-line message for an error that Hydra raised: the override, and what is allowed instead.

    Hydra's exceptions have no attribute for an unknown key, so the key is parsed from the message.

    Args:
        error: Hydra's.
        arguments: of the command.
    """
    text = " ".join(str(error).split())
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        return f"{group}={option}: there is no such option; allowed: {', '.join(sorted(error.options))}"
    if unknown := re.match(r"Could not override '(?!hydra\.)([\w.@/]+)'", text):
        return explain_unknown_key(unknown[1], arguments)
    if isinstance(error, OverrideParseException):
        return explain_unreadable(error.override, text.split(" See https")[0].rstrip("."))
    if several := re.match(r"Ambiguous value for argument '(.+?)' 1\.", text):
        return (
            f"{several[1]}: has several values. Use one of them, key=[value1,value2] for a list, \"key='value1,value2'\" for a "
            "text with a comma, or `ddp-lab train --multirun ...` to train with each of them"
        )
    if set_for := re.search(r"(?:Key|argument) '(\w+)'.* full_key: (hydra\.[\w.]+?)(?:\.\1)?(?: |$)", text):
        group = set_for[2].replace(".", "/")
        return (
            f"{set_for[2]}.{set_for[1]}: is set, but the chosen {group} has no such key. Remove one of the two; "
            "experiment=search needs hydra/launcher=torchrun, hydra/sweeper=optuna and a sampler with a seed"
        )
    return text.split(" See https")[0] + ". Overrides look like key=value: ddp-lab train --help"


def explain_unreadable(override: str, reason: str) -> str:
    """Return the message for an override that is not in Hydra's grammar, which does not know letters such as ü, for example.

    Args:
        override: of the command line.
        reason: the parser's.
    """
    key, equals, value = override.partition("=")
    if not equals:
        return f"{override or repr('')}: overrides look like key=value: ddp-lab train --help"
    if value and value[0] not in "[{'\"":
        advised = shlex.quote(f"{key}=" + quote(value, mark='"'))
        return f"{override}: Hydra cannot read this value. Put it in quotes, within those of the shell: {advised}"
    return (
        f"{override}: Hydra cannot read this override ({reason}). Overrides look like key=value, key=[a,b] or key={{a:b}}: "
        "ddp-lab train --help"
    )


def explain_unknown_key(key: str, arguments: list[str]) -> str:
    """Return the message for a key that does not exist.

    The message lists the keys that exist, for the groups chosen on the command line.

    Args:
        key: the key.
        arguments: of the command.
    """
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    config_dir, others = split_config_dir(arguments)
    chosen = [each for each in others if "," not in each and (each.split("=")[0] in groups or "._target_=" in each)]
    node = compose_config(chosen, config_dir)
    path = key.split(".")
    while len(path) > 1 and isinstance(node.get(path[0]), DictConfig):
        node = node[path.pop(0)]
    prefix = key.removesuffix(".".join(path))
    allowed = [name for name in map(str, node) if not name.startswith("_")]
    value = next((override.split("=", 1)[1] for override in others if override.split("=")[0] == key), "")
    if path[0] in parameters(prefix.rstrip("."), node):
        return f"{key}={value}: the config does not set this option of {node['_target_']}; use +{key}={value}"
    return unknown_key(key, value, prefix, allowed)


def parameters(group: str, node: DictConfig) -> Collection[str]:
    """Return the parameters of the class or function that a group's `_target_` names; none if there is no such one."""
    try:
        return options(group, {"_target_": node.get("_target_")}).model_fields if group in GROUPS else ()
    except ConfigError:
        return ()
