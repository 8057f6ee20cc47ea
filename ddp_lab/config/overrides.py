"""Checks of Hydra overrides before Hydra composes the config of them.

Each message names the override, and what is allowed instead. What an override may set is read from
the yaml of conf/ and of the user's own directory, with the chosen options of the groups.
"""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_lab.config.build import GROUPS, options
from ddp_lab.config.check import unknown_key
from ddp_lab.config.compose import CONF, compose, quote
from ddp_lab.config.errors import ConfigError

HELP = "Overrides look like key=value: ddp-lab train --help"
# A name in quotes in {"name": value}, which Hydra cannot read.
QUOTED_NAME = re.compile(r"""(["'])([^"']*)\1(\s*:)""")
# Options of Hydra's own groups that have more keys than the default ones.
LARGER = {"hydra/launcher": "torchrun", "hydra/sweeper": "optuna"}


def check_overrides(
    overrides: Sequence[str], config_dir: str | None = None, sweep: bool = False
) -> None:
    """Check the overrides of a command line.

    Args:
        overrides: Hydra overrides.
        config_dir: The directory of the user's own yaml, if there is one.
        sweep: Whether an override may have several values, because each of them is a job.

    Raises:
        ConfigError: The first override that is not in Hydra's grammar; if there is none, the first
            one with an option, a key or a number of values that does not exist here; or there is no
            directory `config_dir`.
    """
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(
            f"--config-dir {config_dir}: there is no such directory. Use the directory of your own "
            "yaml"
        )

    parsed = [parse(override) for override in overrides]
    groups = find_groups(config_dir)
    for override in parsed:
        if override.is_sweep_override() and not sweep:
            raise ConfigError(
                f"{override.input_line}: has several values. Use one of them, key=[value1,value2] "
                "for a list, \"key='value1,value2'\" for a text with a comma, or `ddp-lab train "
                "--multirun ...` to train with each of them"
            )
        if override.key_or_group in groups:
            check_option(override, groups[override.key_or_group])

    sets_keys = [override for override in parsed if is_of_key(override, groups)]
    if sets_keys or any(override.key_or_group == "experiment" for override in parsed):
        check_keys(sets_keys, parsed, groups, config_dir)


def for_own_classes(overrides: list[str], config_dir: str | None) -> list[str]:
    """Return overrides that remove the defaults which a typed class of the user's lacks, too.

    Args:
        overrides: Hydra overrides, checked.
        config_dir: The directory of the user's own yaml, if there is one.
    """
    keys = ("optimizer._target_=", "task._target_=")
    if not any(key in override for override in overrides for key in keys):
        return overrides
    from ddp_lab.config.other_class import without_lacking

    return without_lacking(overrides, config_dir)


def parse(override: str) -> Override:
    """Return an override as Hydra reads it.

    Raises:
        ConfigError: Hydra cannot read it. Its grammar has no letters such as ü, for example.
    """
    try:
        (parsed,) = OverridesParser.create().parse_overrides([override])
    except OverrideParseException as error:
        raise ConfigError(explain_unreadable(override, str(error))) from None
    return parsed


def explain_unreadable(override: str, reason: str) -> str:
    """Return the message for an override that is not in Hydra's grammar.

    Args:
        override: Of the command line.
        reason: The parser's message.
    """
    key, equals, value = override.partition("=")
    if not equals:
        return f"{override or repr('')}: overrides look like key=value: ddp-lab train --help"
    if value and value[0] not in "[{'\"":
        quoted = quote(value, mark='"')
        advised = shlex.quote(f"{key}={quoted}")
        return (
            f"{override}: Hydra cannot read this value. Put it in quotes, within those of the "
            f"shell: {advised}"
        )

    unquoted = QUOTED_NAME.sub(r"\2\3", value)
    if value[:1] == "{" and unquoted != value:
        return (
            f"{override}: Hydra cannot read names in quotes. Write them without quotes, within "
            f"those of the shell: {shlex.quote(f'{key}={unquoted}')}"
        )

    first_sentence = " ".join(reason.split()).partition(" See https")[0].rstrip(".")
    return (
        f"{override}: Hydra cannot read this override ({first_sentence}). Overrides look like "
        "key=value, key=[a,b] or key={a:b}: ddp-lab train --help"
    )


def find_groups(config_dir: str | None) -> dict[str, set[str]]:
    """Return the options of each group of conf/ and the user's directory, Hydra's own excepted."""
    groups: dict[str, set[str]] = {}
    for root in (CONF, *([] if config_dir is None else [Path(config_dir)])):
        for path in root.rglob("*.yaml"):
            group = path.parent.relative_to(root).as_posix()
            if group != "." and not group.startswith("hydra/"):
                groups.setdefault(group, set()).add(path.stem)
    return groups


def check_option(override: Override, available: Collection[str]) -> None:
    """Check that an override chooses options of a group that exist.

    Raises:
        ConfigError: It does not.
    """
    group = override.key_or_group
    if override.is_delete():
        return
    if override.is_add() and (CONF / group).is_dir():
        changed = str(override.input_line).removeprefix("+")
        raise ConfigError(f"{override.input_line}: the config has a {group} already. Use {changed}")

    chosen: list[Any] = [override.value()]
    if override.is_sweep_override():
        chosen = list(override.sweep_iterator())
    for option in chosen:
        if not isinstance(option, str):
            raise ConfigError(
                f"{override.input_line}: a group cannot be null or a list. Use one of: "
                f"{', '.join(sorted(available))}"
            )
        name = option.removesuffix(".yaml")
        if name not in available:
            allowed = ", ".join(sorted(available))
            raise ConfigError(f"{group}={name}: there is no such option; allowed: {allowed}")


def is_choice(override: Override, groups: Mapping[str, Collection[str]]) -> bool:
    """Return whether an override chooses an option of a group."""
    return override.key_or_group in groups or "/" in override.key_or_group


def is_of_key(override: Override, groups: Mapping[str, Collection[str]]) -> bool:
    """Return whether an override is about a key that must exist, or must not."""
    return not (is_choice(override, groups) or override.package or override.is_force_add())


def check_keys(
    sets_keys: Sequence[Override],
    overrides: Sequence[Override],
    groups: Mapping[str, Collection[str]],
    config_dir: str | None,
) -> None:
    """Check that overrides change or remove keys that exist, and add keys that do not.

    Args:
        sets_keys: The overrides of keys.
        overrides: All overrides, which choose the options of groups.
        groups: From `find_groups`.
        config_dir: The directory of the user's own yaml, if there is one.

    Raises:
        ConfigError: One does not.
    """
    choices = [override for override in overrides if is_choice(override, groups)]
    swept = {override.key_or_group for override in choices if override.is_sweep_override()}
    if "experiment" in swept:  # each job has other keys; Hydra composes them one by one
        return

    fixed = [str(each.input_line) for each in choices if each.key_or_group not in swept]
    values, chosen = compose_choices(fixed, config_dir)
    targets = {
        override.key_or_group.removesuffix("._target_"): override.value()
        for override in sets_keys
        if override.key_or_group.endswith("._target_") and not override.is_sweep_override()
    }

    added: set[str] = set()
    changed_before: set[str] = set()
    for override in sets_keys:
        key = override.key_or_group
        if key.partition(".")[0] in swept:
            continue
        exists = has_key(values, key)
        if override.is_delete() and exists and key not in changed_before:
            refuse_empty(override, values)
        if exists and key not in changed_before:
            refuse_table_for_list(override, values)
        changed_before.add(key)
        if override.is_add():
            if exists and not is_table(values, key):
                changed = str(override.input_line).removeprefix("+")
                raise ConfigError(
                    f"{override.input_line}: the config sets {key} already. Use {changed}"
                )
            added.add(key)
        elif not exists and not any(key.startswith(f"{each}.") or key == each for each in added):
            raise ConfigError(explain_key(override, values, chosen, targets, config_dir))


def compose_choices(
    choices: list[str], config_dir: str | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config of chosen options, without resolving it, and the option of each group.

    Raises:
        ConfigError: Options exclude each other: one sets a key that another one does not have.
    """
    try:
        config = compose(choices, config_dir, with_choices=True)
    except ConfigCompositionException as error:
        cause = error.__context__
        if not isinstance(cause, OmegaConfBaseException) or not cause.full_key:
            raise
        raise ConfigError(explain_excluded(str(cause.full_key))) from None
    values = cast("dict[str, Any]", OmegaConf.to_container(config))
    return values, dict(config.hydra.runtime.choices)


def explain_excluded(key: str) -> str:
    """Return the message for a key of a chosen option, such as an experiment that another lacks."""
    group = key.rpartition(".")[0].replace(".", "/")
    return (
        f"{key}: is set, but the chosen {group} has no such key. Remove one of the two; "
        "experiment=search needs hydra/launcher=torchrun (the default), hydra/sweeper=optuna and a "
        "sampler with a seed"
    )


def has_key(values: Mapping[str, Any], key: str) -> bool:
    """Return whether a dotted key exists. Whether a list has an element is left to Hydra."""
    node: Any = values
    for name in key.split("."):
        if isinstance(node, list):
            return True
        if not isinstance(node, dict) or name not in node:
            return False
        node = cast("dict[str, Any]", node)[name]
    return True


def is_table(values: Mapping[str, Any], key: str) -> bool:
    """Return whether the value of a key that exists is a dict, to which `+` may add keys."""
    return isinstance(value_of(values, key), dict)


def value_of(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key that exists; None for an element of a list."""
    node: Any = values
    for name in key.split("."):
        node = node[name] if isinstance(node, dict) else None
    return node


def refuse_table_for_list(override: Override, values: Mapping[str, Any]) -> None:
    """Check that an override does not set a table in place of a list, which Hydra cannot merge.

    Raises:
        ConfigError: It does.
    """
    key = override.key_or_group
    if override.is_delete() or override.is_sweep_override() or override.is_add():
        return
    if isinstance(override.value(), dict) and isinstance(value_of(values, key), list):
        value = str(override.input_line).partition("=")[2]
        in_list = shlex.quote(f"{key}=[{value}]")
        raise ConfigError(f"{override.input_line}: must be a list. Use {in_list}")


def refuse_empty(override: Override, values: Mapping[str, Any]) -> None:
    """Check that an override does not remove a key without a value, which Hydra cannot do.

    Raises:
        ConfigError: It does.
    """
    key = override.key_or_group
    node: Any = values
    for name in key.split("."):
        node = node[name] if isinstance(node, dict) else ...  # Hydra reads elements of lists
    if node is None or node == "???":
        value = "null" if node is None else "not set"
        raise ConfigError(
            f"{override.input_line}: cannot be removed, because {key} has no value: it is {value}. "
            f"Leave this override out, or set a value with {key}=VALUE"
        )


def explain_key(
    override: Override,
    values: Mapping[str, Any],
    chosen: Mapping[str, str],
    targets: Mapping[str, Any],
    config_dir: str | None,
) -> str:
    """Return the message for a key that does not exist.

    Args:
        override: It changes or removes the key.
        values: The config of the chosen options.
        chosen: The option of each group.
        targets: The class or function of a group, where an override sets it.
        config_dir: The directory of the user's own yaml, if there is one.
    """
    key = override.key_or_group
    if override.is_delete():
        return f"{override.input_line}: cannot be removed, because the config does not set {key}"
    value = str(override.input_line).partition("=")[2]
    node: Mapping[str, Any] = values
    path = key.split(".")
    while len(path) > 1 and isinstance(node.get(path[0]), dict):
        node = node[path.pop(0)]

    prefix = key.removesuffix(".".join(path))
    group = prefix.rstrip(".")
    hydra_group = group.replace(".", "/")
    if hydra_group in LARGER:
        return (
            f"{key}={value}: {hydra_group}={chosen[hydra_group]} has no such key; "
            f"{hydra_group}={LARGER[hydra_group]} has more"
        )

    target = targets.get(group, node.get("_target_"))
    if path[0] in parameters(group, target):
        return f"{key}={value}: the config does not set this option of {target}; use +{key}={value}"
    allowed = [name for name in node if not name.startswith("_") and name != "hydra"]
    return unknown_key(key, value, prefix, allowed, config_dir)


def parameters(group: str, target: Any) -> Collection[str]:
    """Return the parameters of the class or function of a group; none if there is no such one."""
    if group not in GROUPS:
        return ()
    try:
        return options(group, {"_target_": target}).model_fields
    except ConfigError:
        return ()
