"""The options of a config group: the parameters of the constructor that its `_target_` names."""

import inspect
import logging
import re
from typing import Any, get_origin, get_type_hints

from hydra.utils import get_object
from pydantic import BaseModel, ConfigDict, Field, create_model

from ddp_lab.config.errors import ConfigError
from ddp_lab.config.schema import Keys, ModelConfig, OptimizerConfig

# The groups in the order in which they are checked. Each is listed with the constructor parameters that the code passes, which
# are therefore not keys of the config.
GROUPS: dict[str, list[str]] = {
    "data.dataset": ["images", "split", "train"],
    "model": ["in_channels", "image_size", "num_classes"],
    "strategy": ["runtime", "inner"],
    "loss": ["reduction"],
    "optimizer": ["params"],
    "scheduler": ["progress", "epoch"],
}


class AnyKeys(Keys):
    """The options of a constructor with `**kwargs`."""

    model_config = ConfigDict(extra="allow")


def options(group: str, node: dict[str, Any]) -> type[BaseModel]:
    """Return the schema of a group's options.

    The constructor is imported, which may import torch (1.5 s).

    Args:
        group: A key of GROUPS.
        node: The group's part of the config.

    Raises:
        ConfigError: `_target_` is missing or is not the name of a class or function.
    """
    target = find_target(group, node.get("_target_", "???"))
    try:
        hints = get_type_hints(target.__init__ if inspect.isclass(target) else target, include_extras=True)
    except NameError:  # an annotation that exists only for type checkers
        hints = {}
    texts = descriptions(target)
    fields, base = {}, Keys
    parameters = list(inspect.signature(target).parameters.items())
    if group == "loss" and not inspect.isclass(target):  # a function gets the logits and the targets at every step
        parameters = parameters[2:]
    for name, parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            base = AnyKeys
        if name in GROUPS[group] or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        hint = hints.get(name, Any)
        default = ... if parameter.default is parameter.empty else parameter.default
        # YAML has no tuples, so a list is accepted in place of a tuple.
        fields[name] = (list if get_origin(hint) is tuple else hint, Field(default, description=texts.get(name)))
        if group == "optimizer" and (known := OptimizerConfig.model_fields.get(name)):
            fields[name] = (known.annotation, known)
    if group == "model":
        fields |= {name: (field.annotation, field) for name, field in ModelConfig.model_fields.items()}
    return create_model(target.__name__, __base__=base, **fields)


def find_target(group: str, name: Any) -> Any:
    """Return the class or function that `_target_` names.

    Raises:
        ConfigError: `_target_` is missing or is not the name of a class or function.
    """
    allowed = (
        "must be the name of a class or function that Python can import, for example mynet.MyNet from a file mynet.py in the "
        "current directory"
    )
    if name == "???":
        raise ConfigError(f"{group}._target_: is missing; it {allowed}")
    log = logging.getLogger("hydra.utils")  # get_object logs the error that it raises, which would be a second message
    log.disabled = True
    try:
        target = get_object(name)
    except (ImportError, ValueError, AttributeError) as error:
        reason = error.__cause__ or error.__context__
        raise ConfigError(f"{group}._target_={name}: {allowed}{f' ({reason})' if reason else ''}") from None
    finally:
        log.disabled = False
    if not (inspect.isclass(target) or inspect.isroutine(target)):
        raise ConfigError(f"{group}._target_={name}: {allowed}; it is a {type(target).__name__}")
    return target


def descriptions(target: Any) -> dict[str, str]:
    """Return the texts of the `Args:` section of a docstring, by argument name; a class inherits those of its bases."""
    found = {}
    for described in reversed(inspect.getmro(target)) if inspect.isclass(target) else [target]:
        section = re.search(r"^Args:\n((?:    .*\n?)+)", inspect.cleandoc(described.__doc__ or ""), re.MULTILINE)
        for name, text in re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", section[1] if section else "", re.MULTILINE):
            text = " ".join(text.split())
            found[name] = text[0].upper() + text[1:]
    return found
