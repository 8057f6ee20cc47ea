"""Objects that a user names by an import path with options, or passes as a class or an instance."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from ddp_lab.config.build import construct, find_target, options
from ddp_lab.config.check import validate
from ddp_lab.config.errors import ConfigError, describe_error


class UserPart(NamedTuple):
    """An object of the user.

    Attributes:
        label: import path of its class, for messages.
        value: the object.
        settings: what the project takes of its options.
    """

    label: str
    value: Any
    settings: dict[str, Any]


def accept(kind: type, label: str) -> None:
    """Accept any class."""


def make_part(
    key: str,
    value: Any,
    reserved: Sequence[str] = (),
    check: Callable[[type, str], None] = accept,
) -> UserPart:
    """Construct an object of the user.

    Args:
        key: of the config, or the argument of `Lab.trainer`; begins each message.
        value: an import path; or a dict with `_target_`, an import path, and options; or a class;
            or an object.
        reserved: names of options that are not those of the class.
        check: gets the class of the object and its label, before the object is constructed if it is
            named by its class, and raises a ConfigError if it is none of those that `key` takes.

    Raises:
        ConfigError: there is no such class, `check` refuses it, or it cannot be constructed.
    """
    part = construct_part(key, value, reserved, check)
    check(type(part.value), part.label)
    return part


def construct_part(
    key: str, value: Any, reserved: Sequence[str], check: Callable[[type, str], None]
) -> UserPart:
    """Construct an object as `make_part`, and check its class if it is named by it."""
    if isinstance(value, str):
        value = {"_target_": value}
    if isinstance(value, Mapping):
        return part_of_node(key, dict(cast("Mapping[str, Any]", value)), reserved, check)
    if not isinstance(value, type):
        return UserPart(path_of(type(value)), value, {})
    check(value, path_of(value))
    try:
        return UserPart(path_of(value), value(), {})
    except Exception as error:
        raise ConfigError(
            f"{key}: {path_of(value)} cannot be constructed: {describe_error(error)}. Pass an "
            "instance if its constructor needs arguments"
        ) from None


def part_of_node(
    key: str,
    node: dict[str, Any],
    reserved: Sequence[str],
    check: Callable[[type, str], None],
) -> UserPart:
    """Construct an object of the user from `_target_` and options, as `construct_part`."""
    settings = {name: node.pop(name) for name in reserved if name in node}
    path = node.get("_target_", "???")
    target = find_target(f"{key}._target_", path)
    if inspect.isclass(target):
        check(target, path)
    keywords = {name: value for name, value in node.items() if name != "_target_"}
    # Annotations of other packages may not mean what YAML can say.
    if not target.__module__.startswith("torchmetrics."):
        validate(options(key, node), keywords, f"{key}.")
    return UserPart(path, construct(key, {**node, "_convert_": "all"}), settings)


def path_of(kind: type) -> str:
    """Return the import path of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
