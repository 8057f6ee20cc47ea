"""What a user is told about a value or a key that is not allowed: one line, made from pydantic's error."""

import difflib
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ddp_lab.config.types import Allowed

# By pydantic's type of error. All others are a wrong value.
MISSING = "{key}: is missing; it must be {words}"
UNKNOWN = "{key}={value}: there is no such key; {advice}allowed: {allowed}"
WRONG = "{key}={value}: must be {words}"

PLAIN = {int: "an integer", float: "a number", str: "a word", bool: "true or false", list: "a list", NoneType: "null"}


def explain(error: ValidationError, model: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> str:
    """Return the message for the first error: of a missing key if there is one, else in the order of the model's fields.

    Args:
        model: what refused the values.
        values: what was validated.
        prefix: the dotted key of `values`, with its last dot.
    """
    first = min(error.errors(), key=lambda found: found["type"] != "missing")
    name, *rest = first["loc"]
    while rest and is_model(model.model_fields[name].annotation):
        model, values, prefix = model.model_fields[name].annotation, values[name], f"{prefix}{name}."
        name, *rest = rest
    key, value = f"{prefix}{name}", values.get(name)
    if first["type"] == "extra_forbidden":
        return unknown_key(key, value, prefix, [name for name in values if name in model.model_fields])
    form = MISSING if first["type"] == "missing" else WRONG
    return form.format(key=key, value="null" if value is None else value, words=describe_field(model.model_fields[name]))


def unknown_key(key: str, value: Any, prefix: str, names: list[str]) -> str:
    """Return the message for a key that does not exist beside `names`, which exist under `prefix`."""
    close = difflib.get_close_matches(key.removeprefix(prefix).split(".")[0], names, n=1)
    advice = "".join(f"did you mean {prefix}{name}? " for name in close)
    allowed = ", ".join(f"{prefix}{name}" for name in names)
    return UNKNOWN.format(key=key, value=value, advice=advice, allowed=allowed or "none")


def describe_field(field: FieldInfo) -> str:
    """Return what a key of the schema may be, as the end of "must be ..."."""
    return describe(field.annotation, field.metadata)


def describe(hint: Any, metadata: Iterable[Any] = ()) -> str:
    """Return what values an annotation allows, as the end of "must be ..."."""
    for item in metadata:
        if isinstance(item, Allowed):
            return item.words
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return describe(args[0], args[1:])
    if origin in (Union, UnionType):
        composite = any(get_origin(arg) in (list, dict) for arg in args)  # whose words would take "or null" for their own
        return " or ".join(describe(arg) for arg in (reversed(args) if composite else args))
    if origin is Literal:
        return " or ".join(str(arg) for arg in args)
    if origin is list:
        return f"a list, each {describe(args[0])}"
    if origin is dict:
        return f"of the form {{name: value}}, each value {describe(args[1])}"
    return "a config group" if hint is dict or is_model(hint) else PLAIN.get(hint, str(hint))


def is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)
