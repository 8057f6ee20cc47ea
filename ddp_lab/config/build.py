"""A config group: construction of the object that `_target_` names, and schema of its options."""

import inspect
import logging
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Unpack, cast, get_args, get_origin, get_type_hints

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field, create_model

from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.config.schema import Keys, ModelConfig, OptimizerConfig
from ddp_lab.config.types import TRACKERS

Config = DictConfig
# of the group `optimizer`, and no options of its constructor
OF_GROUPS = ("groups", "layer_decay")


def epochs_without_limit(default: int, *limits: float | None) -> int | None:
    """Return the default number of epochs; None, without end, if another limit ends the run."""
    return default if all(limit is None for limit in limits) else None


# the default of `epochs` in conf/config.yaml
OmegaConf.register_new_resolver("epochs_without_limit", epochs_without_limit, replace=True)

# The groups in the order in which they are checked. Each is listed with the constructor parameters
# that the code passes, which are therefore not keys of the config.
GROUPS: dict[str, list[str]] = {
    "data.dataset": ["images", "split", "train"],
    "data.collate_fn": [],
    "model": ["in_channels", "image_size", "num_classes", "input_shape", "vocabulary", "context"],
    "strategy": ["runtime", "mesh_axes"],
    "task": ["loss"],
    "loss": ["reduction"],
    "optimizer": ["params"],
    "scheduler": ["progress", "epoch"],
}
# The groups whose target may be a function that is used as it is, and how many arguments it then
# gets by position.
OF_FUNCTIONS = {"loss": 2, "data.collate_fn": 1}


def call_target(node: DictConfig | dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call what `_target_` names with hydra.utils.instantiate; return the result.

    `fused: null` is not passed to a constructor without this option: some optimizers do not have
    it, and the overrides of a launch line cannot delete a null. An exception of the constructor is
    raised unchanged. A partial is returned as a plain `functools.partial`.

    Args:
        node: The config group: `_target_` and the keyword arguments for it.
        args, kwargs: Further arguments, which the config does not contain.
    """
    if not takes_fused(node):
        node = {str(key): value for key, value in node.items() if key != "fused"}
    try:
        built = instantiate(node, *args, **kwargs)
    except InstantiationException as error:
        raise error.__cause__ or error from None
    # Hydra 1.3.8's own partial costs 0.1 ms per call, and every training step makes one
    if isinstance(built, partial):
        return partial(built.func, *built.args, **built.keywords)
    return built


def build_optimizer(node: DictConfig | dict[str, Any]) -> Any:
    """Return the function of parameters that the config group `optimizer` describes.

    Its keys `groups` and `layer_decay` concern the parameters, which are not known here.
    """
    return call_target({str(key): value for key, value in node.items() if key not in OF_GROUPS})


def plain(node: DictConfig | dict[str, Any]) -> dict[str, Any]:
    """Return a part of the config as plain values."""
    if isinstance(node, DictConfig):
        return cast("dict[str, Any]", OmegaConf.to_container(node, resolve=True))
    return node


def construct(group: str, node: DictConfig | dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Return what `call_target` returns for a group of the config, which its messages name.

    Args:
        group: The key of the group.
        node: The config group: `_target_` and the keyword arguments for it.
        args, kwargs: Further arguments, which the config does not contain.

    Raises:
        ConfigError: The constructor of the user raised an exception. The message has the file and
            the line.
    """
    try:
        return call_target(node, *args, **kwargs)
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        target = str(node["_target_"])
        if target.startswith("ddp_lab."):  # a bug of ours, which needs its traceback
            raise
        key = f"{group}._target_={target}"
        raise ConfigError(f"{key}: cannot be constructed: {describe_error(error)}") from None


def for_cpu(optimizer: Any) -> Any:
    """Return an optimizer for a trial on the CPU, ready for a step.

    It has no `capturable`, which CPUs lack.
    """
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = False
    begin_training(optimizer)
    return optimizer


def require_no_closure(optimizer: Any) -> None:
    """Check that the optimizer's step can be called without arguments.

    Raises:
        ConfigError: it cannot.
    """
    parameters = inspect.signature(optimizer.step).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        each.name for each in parameters if each.default is each.empty and each.kind not in variable
    ]
    if needed:
        raise ConfigError(
            f"optimizer: the step of {type(optimizer).__name__} needs the argument {needed[0]}, by "
            "which it would compute the loss several times in a step. Here a step computes the "
            "gradient once, over the ranks and micro-batches of the global batch. Use an "
            "optimizer whose step needs no argument, for example torch.optim.AdamW"
        )


def has_modes(optimizer: Any) -> bool:
    """Return whether an optimizer evaluates with other weights than it trains with.

    It then has methods train() and eval(), as schedule-free ones.
    """
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def begin_training(optimizer: Any) -> None:
    """Let an optimizer with modes begin in training mode, in which alone it takes steps."""
    if has_modes(optimizer):
        optimizer.train()


def takes_fused(node: DictConfig | dict[str, Any]) -> bool:
    """Return True, or if `fused` is null in the config whether the constructor has that option."""
    return (
        node.get("fused", False) is not None
        or "fused" in inspect.signature(get_object(node["_target_"])).parameters
    )


class AnyKeys(Keys):
    """The options of a constructor with `**kwargs`."""

    model_config = ConfigDict(extra="allow")


def options(group: str, node: dict[str, Any]) -> type[BaseModel]:
    """Return the schema of a group's options.

    The constructor is imported, which may import torch (1.5 s).

    Args:
        group: A key of GROUPS, tracker_options.NAME, or a key that lists classes of the user.
        node: The group's part of the config.

    Raises:
        ConfigError: `_target_` is missing, is not the name of a class or function, or names one
            whose arguments are not known.
    """
    target = find_target(f"{group}._target_", node.get("_target_", "???"))
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except ValueError:  # of most that are written in C
        raise ConfigError(
            f"{group}._target_={node['_target_']}: Python does not know its arguments, because it "
            "is not written in Python, so its options cannot be checked. Use a function or class "
            "of yours that calls it, for example mine.NAME from a file mine.py in the current "
            "directory"
        ) from None
    # a function gets the logits and the targets at every step, or the samples of every batch
    if group in OF_FUNCTIONS and not inspect.isclass(target):
        parameters = parameters[OF_FUNCTIONS[group] :]

    allows_more = any(each.kind is each.VAR_KEYWORD for each in parameters)
    keys_are_known = any(get_origin(hint) is Unpack for hint in hints_of(target).values())
    base = AnyKeys if allows_more and not keys_are_known else Keys
    fields = fields_of(group, target, parameters) | common_fields(group)
    return create_model(target.__name__, __base__=base, **fields)


def hints_of(target: Any) -> dict[str, Any]:
    """Return the types of the arguments of a class or function, by name, as far as known."""
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return get_type_hints(function, include_extras=True)
    except NameError:  # an annotation that exists only for type checkers
        return {}


def fields_of(group: str, target: Any, parameters: Sequence[inspect.Parameter]) -> dict[str, Any]:
    """Return type and field of each option that a class or function has.

    Args:
        group: as in `options`.
        target: the class or function.
        parameters: those of its arguments that a config may have, and those that it is passed.
    """
    hints = hints_of(target)
    texts = descriptions(target)
    passed = GROUPS.get(group, ["run"] if group.startswith("tracker_options.") else [])
    fields = dict[str, Any]()
    for parameter in parameters:
        name = parameter.name
        hint = hints.get(name, Any)
        if get_origin(hint) is Unpack:  # **keys: Unpack[a TypedDict]
            keys = get_type_hints(get_args(hint)[0], include_extras=True)
            fields |= {key: (kind, Field(description=texts.get(key))) for key, kind in keys.items()}
            continue
        if name in passed or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue

        default = ... if parameter.default is parameter.empty else parameter.default
        # YAML has no tuples, so a list is accepted in place of a tuple.
        kind = list if get_origin(hint) is tuple else hint
        fields[name] = (kind, Field(default, description=texts.get(name)))
        if group == "optimizer" and (known := OptimizerConfig.model_fields.get(name)):
            fields[name] = (known.annotation, known)
    return fields


def common_fields(group: str) -> dict[str, Any]:
    """Return type and field of each key that a group has whatever its class."""
    if group == "optimizer":
        known = {
            name: field for name, field in OptimizerConfig.model_fields.items() if name in OF_GROUPS
        }
    elif group == "model":
        known = ModelConfig.model_fields
    else:
        known = {}
    return {name: (field.annotation, field) for name, field in known.items()}


def leaves(node: Any, key: str = "") -> Generator[tuple[str, Any]]:
    """Yield the keys and values of a nested config, after the keys of groups: data.root."""
    if not isinstance(node, dict):
        yield key, node
        return
    for name, value in node.items():
        yield from leaves(value, f"{key}.{name}" if key else str(name))


def tracker_nodes(
    tracker: str | Sequence[str], options: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return `_target_` and the options of each chosen tracker, by name.

    Args:
        tracker: the key `tracker`.
        options: the key `tracker_options`. The options of mine.Tracker are in it as {"mine":
            {"Tracker": {...}}}.
    """
    names = [tracker] if isinstance(tracker, str) else tracker
    return {
        name: {
            "_target_": TRACKERS.get(name, name),
            **reduce(lambda node, part: node.get(part, {}), name.split("."), options),
        }
        for name in names
        if name != "none"
    }


def chosen_trackers(
    tracker: str | Sequence[str], options: Mapping[str, Any]
) -> dict[str, Callable[[Any], Any]]:
    """Return a function of a TrackedRun that constructs each chosen tracker, by name.

    Arguments as in `tracker_nodes`.
    """
    return {
        name: partial(make_tracker, node) for name, node in tracker_nodes(tracker, options).items()
    }


def make_tracker(node: Mapping[str, Any], run: Any) -> Any:
    """Import a tracker's class, and construct it for a TrackedRun."""
    options = {key: value for key, value in node.items() if key != "_target_"}
    return get_object(node["_target_"])(run, **options)


def find_target(key: str, name: Any) -> Any:
    """Return the class or function that the value of a key names, or a class that it is.

    Raises:
        ConfigError: the value is missing or is not the name of a class or function.
    """
    allowed = (
        "must be the name of a class or function that Python can import, for example mynet.MyNet "
        "from a file mynet.py in the current directory"
    )
    if name == "???":
        raise ConfigError(f"{key}: is missing; it {allowed}")

    if inspect.isclass(name):  # in a Lab
        return name
    # get_object logs the error that it raises, which would be a second message
    log = logging.getLogger("hydra.utils")
    log.disabled = True
    try:
        target = get_object(name)
    except (ImportError, ValueError, AttributeError) as error:
        reason = error.__cause__ or error.__context__
        raise ConfigError(f"{key}={name}: {allowed}{f' ({reason})' if reason else ''}") from None
    finally:
        log.disabled = False

    if not (inspect.isclass(target) or inspect.isroutine(target)):
        raise ConfigError(f"{key}={name}: {allowed}; it is a {type(target).__name__}")
    return target


def descriptions(target: Any) -> dict[str, str]:
    """Return the texts of the `Args:` section of a docstring, by argument name.

    A class inherits those of its bases.
    """
    texts = {}
    for described in reversed(inspect.getmro(target)) if inspect.isclass(target) else [target]:
        section = re.search(
            r"^Args:\n((?:    .*\n?)+)", inspect.cleandoc(described.__doc__ or ""), re.MULTILINE
        )
        for name, text in re.findall(
            r"^    (\w+): (.+(?:\n {8}.+)*)", section[1] if section else "", re.MULTILINE
        ):
            text = " ".join(text.split())
            texts[name] = text[0].upper() + text[1:]
    return texts
