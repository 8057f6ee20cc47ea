"""One-line error messages for keys and values that are not allowed, made from pydantic's errors."""

import difflib
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ddp_lab.config.types import Allowed

# Message templates by the type of pydantic's error: MISSING for "missing", UNKNOWN for "extra_forbidden", WRONG for all others.
MISSING = "{key}: is missing; it must be {allowed}"
UNKNOWN = "{key}={value}: there is no such key; {advice}allowed: {allowed}"
WRONG = "{key}={value}: must be {allowed}"

PLAIN = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    list: "a list",
    NoneType: "null",
    Any: "any value",
}


def explain(error: ValidationError, model: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> str:
    """Return the message for the first missing key or, if no key is missing, for the first wrong value.

    Args:
        error: The errors of all keys, in the order of the model's fields.
        model: The model that rejected the values.
        values: The values that were validated.
        prefix: Dotted key of `values`, including the last dot.
    """
    first = min(error.errors(), key=lambda found: found["type"] != "missing")
    name, *rest = map(str, first["loc"])
    while rest and is_model(nested := model.model_fields[name].annotation):
        model, values, prefix = nested, values[name], f"{prefix}{name}."
        name, *rest = rest
    key, value = f"{prefix}{name}", values.get(name)
    if first["type"] == "extra_forbidden":
        set_in_conf = [name for name in values if name in model.model_fields]
        return unknown_key(key, value, prefix, list(dict.fromkeys([*set_in_conf, *model.model_fields])))
    template = MISSING if first["type"] == "missing" else WRONG
    return template.format(key=key, value="null" if value is None else value, allowed=describe_field(model.model_fields[name]))


def unknown_key(key: str, value: Any, prefix: str, names: list[str]) -> str:
    """Return the message for a key that does not exist.

    Args:
        key: Full dotted key.
        value: Its value.
        prefix: Dotted key of the group, including the last dot.
        names: The keys that exist in the group.
    """
    close = difflib.get_close_matches(key.removeprefix(prefix).split(".")[0], names, n=1)
    advice = "".join(f"did you mean {prefix}{name}? " for name in close)
    allowed = ", ".join(f"{prefix}{name}" for name in names)
    return UNKNOWN.format(key=key, value=value, advice=advice, allowed=allowed or "none")


def describe_field(field: FieldInfo) -> str:
    """Return the allowed values of a schema field, as the end of "must be ..."."""
    return describe(field.annotation, field.metadata)


def describe(hint: Any, metadata: Iterable[Any] = ()) -> str:
    """Return the allowed values of a type annotation, as the end of "must be ..."."""
    for item in metadata:
        if isinstance(item, Allowed):
            return item.text
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return describe(args[0], args[1:])
    if origin in (Union, UnionType):
        # The order is "null or a list, each X": in "a list, each X or null", the null would seem to be an alternative to X.
        composite = any(get_origin(arg) in (list, dict) for arg in args)
        return " or ".join(describe(arg) for arg in (reversed(args) if composite else args))
    if origin is Literal:
        return " or ".join(str(arg) for arg in args)
    if origin is list:
        return f"a list, each {describe(args[0])}"
    if origin is dict:
        return f"of the form {{name: value}}, each value {describe(args[1])}"
    return "a config group" if is_model(hint) else PLAIN.get(hint, str(hint))


def is_model(hint: Any) -> TypeGuard[type[BaseModel]]:
    """Return whether a type annotation is a pydantic model."""
    return isinstance(hint, type) and issubclass(hint, BaseModel)
