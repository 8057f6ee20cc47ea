"""The config's contract: what every key may be.

A key's rule is the annotation of the parameter that reads it: `Config` below for the run's own keys, the constructor
named by `_target_` for the groups. So a new option brings its own check.
"""

import inspect
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from ddp_lab.config.errors import ConfigError
from ddp_lab.config.faults import KINDS, parse


class Rule(NamedTuple):
    """What an annotated value must be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Rule("an integer of at least 1", lambda value: value >= 1)]
NaturalNumber = Annotated[int, Rule("an integer of at least 0", lambda value: value >= 0)]
Positive = Annotated[float, Rule("a number above 0", lambda value: 0 < value < math.inf)]
NonNegative = Annotated[float, Rule("a number of at least 0", lambda value: 0 <= value < math.inf)]
Fraction = Annotated[float, Rule("a number from 0 up to, not including, 1", lambda value: 0 <= value < 1)]
DeviceName = Annotated[str, Rule("cpu, cuda or cuda:N", lambda value: bool(re.fullmatch(r"cpu|cuda|cuda:\d+", value)))]
RunName = Annotated[
    str,
    Rule(
        "a plain directory name (letters, digits and . _ = , + -, not beginning with a dot)",
        lambda value: bool(re.fullmatch(r"[\w=,+-][\w.=,+-]*", value)),
    ),
]
Injection = Annotated[
    str, Rule(f"of the form KIND@rank=R,step=S, KIND one of {', '.join(KINDS)}", lambda value: parse(value) is not None)
]
Resume = Annotated[
    str,
    Rule(
        "auto, never or the path of an existing checkpoint", lambda value: value in ("auto", "never") or Path(value).is_file()
    ),
]


class DataConfig(NamedTuple):
    dataset: dict
    root: str
    loader: Literal["device", "workers"]
    num_workers: NaturalNumber
    shift: NaturalNumber
    flip: bool
    mean: list[float]
    std: list[Positive]


class CheckpointConfig(NamedTuple):
    every_epochs: Count
    every_steps: Count | None
    keep: Annotated[int, Rule("an integer of at least 2", lambda value: value >= 2)]
    on_error: Literal["stop", "continue"]


class Config(NamedTuple):
    seed: Annotated[int, Rule("an integer from 0 to 2**32 - 1", lambda value: 0 <= value < 2**32)]
    epochs: Count
    batch_size: Count
    scaling: Literal["strong", "weak"]
    lr_scaling: Literal["none", "linear", "sqrt"]
    lr_base_batch_size: Count
    warmup_epochs: NonNegative
    accumulate: Count
    max_grad_norm: Positive | None
    device: Literal["auto", "mps"] | DeviceName
    precision: Literal["float32", "bf16"]
    cuda_graph: bool
    compile: bool | Literal["tuned"]
    channels_last: bool
    timeout: Positive
    name: RunName | None
    runs_dir: str
    resume: Resume
    on_nan: Literal["stop", "skip"]
    patience: Count | None
    check_replicas: Count | None
    profile: bool
    inject: Injection | None
    checkpoint: CheckpointConfig
    data: DataConfig
    model: dict
    strategy: dict
    optimizer: dict
    scheduler: dict


# What train.py passes to constructors itself, so that no config may.
PASSED = {
    "strategy": ["runtime"],
    "model": ["in_channels", "image_size", "num_classes"],
    "optimizer": ["params"],
    "scheduler": ["progress"],
}
# torch's optimizers annotate types but not ranges.
RANGES = {"optimizer.lr": Positive, "optimizer.momentum": Fraction, "optimizer.weight_decay": NonNegative}


def fits(value: Any, hint: Any) -> bool:
    """Whether a config value can be passed where `hint` is the annotation; an int is a float, a bool is neither."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return fits(value, args[0]) and all(rule.holds(value) for rule in args[1:])
    if origin in (Union, UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is list:
        return isinstance(value, list) and all(fits(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, args[1]) for item in value.values())
    if hint in (int, float):
        return isinstance(value, int | float if hint is float else int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


def words(hint: Any) -> str:
    """What `hint` allows, for a message."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return args[1].words
    if origin in (Union, UnionType):
        composite = any(get_origin(arg) in (list, dict) for arg in args)  # whose words would take "or null" for their own
        return " or ".join(words(arg) for arg in (reversed(args) if composite else args))
    if origin is Literal:
        return " or ".join(str(arg) for arg in args)
    if origin is list:
        return f"a list, each {words(args[0])}"
    if origin is dict:
        return f"of the form {{name: value}}, each value {words(args[1])}"
    plain = {
        int: "an integer",
        float: "a number",
        str: "a word",
        bool: "true or false",
        dict: "a config group",
        NoneType: "null",
    }
    return plain.get(hint, str(hint))


def check_value(key: str, value: Any, hint: Any) -> None:
    hint = RANGES.get(key, hint)
    if not fits(value, hint):
        shown = "null" if value is None else value
        raise ConfigError(f"{key}={shown}: must be {words(hint)}")


def check_node(prefix: str, node: dict[str, Any], hints: dict[str, Any]) -> None:
    """Every key has a rule and keeps it."""
    for key, value in node.items():
        path = f"{prefix}{key}"
        if key not in hints:
            allowed = ", ".join(f"{prefix}{name}" for name in node if name in hints) or "none"
            raise ConfigError(f"{path}={value}: there is no such key; allowed: {allowed}")
        hint = hints[key]
        if isinstance(hint, type) and issubclass(hint, tuple):
            check_node(f"{path}.", value, get_type_hints(hint, include_extras=True))
        else:
            check_value(path, value, hint)
            if hint is dict:
                check_target(path, value)


def check_target(prefix: str, node: dict[str, Any]) -> None:
    """As check_node, for what `_target_` names: the rules are its annotations."""
    try:
        target = get_object(node["_target_"])
    except (KeyError, ImportError, ValueError):
        raise ConfigError(f"{prefix}._target_={node.get('_target_')}: must be the name of a class or function") from None
    function = target.__init__ if inspect.isclass(target) else target
    hints = get_type_hints(function, include_extras=True)
    passed = PASSED.get(prefix, [])
    parameters = {name: value for name, value in inspect.signature(target).parameters.items() if name not in passed}
    for name, parameter in parameters.items():
        if name not in node and parameter.default is parameter.empty:
            raise ConfigError(f"{prefix}.{name}: is missing; it must be {words(hints.get(name, Any))}")
    allowed = {name: hints.get(name, Any) for name in parameters}
    check_node(f"{prefix}.", {key: value for key, value in node.items() if not key.startswith("_")}, allowed)


def check(cfg: DictConfig) -> None:
    """Checks every key of the composed config against its rule.

    Raises:
        ConfigError: the first key that has no reader, or a value of the wrong type or out of range.
    """
    hints = get_type_hints(Config, include_extras=True)
    for key in hints:
        if key not in cfg:
            raise ConfigError(f"{key}: is missing; it must be {words(hints[key])}")
    for key in RANGES:  # before the groups: what annotates their other options imports torch, which takes 1.5 s
        if (value := OmegaConf.select(cfg, key)) is not None:
            check_value(key, value, RANGES[key])
    check_node("", OmegaConf.to_container(cfg, resolve=True), hints)
    import torch  # takes 1.5 s, which the mistakes found above need not wait for

    try:
        build(cfg.optimizer)([torch.nn.Parameter(torch.zeros(1))])  # what only the optimizer itself knows of its options
    except (TypeError, ValueError) as error:
        options = ", ".join(f"{key}={value}" for key, value in cfg.optimizer.items() if not key.startswith("_"))
        raise ConfigError(f"optimizer: {error}; it was given {options}") from None


def build(node: DictConfig, *args: Any, **kwargs: Any) -> Any:
    """hydra.utils.instantiate, but an exception of the constructor is raised as it is, and a partial is Python's own."""
    try:
        built = instantiate(node, *args, **kwargs)
    except InstantiationException as error:
        raise error.__cause__ or error from None
    if isinstance(built, partial):  # Hydra 1.3.8's looks up its policy at every call: 0.1 ms, and a step has one
        return partial(built.func, *built.args, **built.keywords)
    return built
