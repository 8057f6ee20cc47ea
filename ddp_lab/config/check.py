"""Validation of a composed config against its schema, with one-line messages about mistakes."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, TypeVar, Union, get_args, get_origin

from omegaconf import DictConfig
from pydantic import BaseModel, ValidationError

from ddp_lab.config.build import (
    GROUPS,
    OF_GROUPS,
    build_optimizer,
    find_target,
    for_cpu,
    options,
    plain,
    require_no_closure,
    takes_fused,
    tracker_nodes,
)
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.config.schema import OptimizerConfig, RunConfig
from ddp_lab.config.types import EXTRAS, LIMITS, TRACKERS, Allowed

M = TypeVar("M", bound=BaseModel)

METHODS = ("log_metrics", "log_media", "finish")  # of a tracker

PLAIN = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    list: "a list",
    NoneType: "null",
    Any: "a value of any kind",
}


def check(cfg: DictConfig) -> RunConfig:
    """Validate the config and return it as a frozen object of plain values.

    The groups with a `_target_` remain dicts.

    Raises:
        ConfigError: A key is missing or does not exist, or a value has the wrong type or is out of
            range.
    """
    values = plain(cfg)
    config = validate(RunConfig, values)
    check_limits(values)
    groups = {
        "data.dataset": config.data.dataset,
        "data.collate_fn": config.data.collate_fn,
        **{name: getattr(config, name) for name in GROUPS if "." not in name},
    }
    if not any(value is not None for value in config.data.collate_fn.values()):
        del groups["data.collate_fn"]  # samples of equal shapes are stacked
    check_trackers(config.tracker, config.tracker_options)
    check_metrics(config.metrics)
    find_parts("callbacks", config.callbacks)
    # The optimizer's ranges are checked first, because looking up the constructors imports torch,
    # which takes 1.5 s.
    validate(OptimizerConfig, config.optimizer, "optimizer.")

    for group, node in groups.items():
        group_options = {
            key: value for key, value in node.items() if not key.startswith("_") and value != "???"
        }
        schema = options(group, node)
        if group == "optimizer" and not takes_fused(node):
            del group_options["fused"]
        validate(schema, group_options, f"{group}.")
        if group == "optimizer" and node.get("groups"):
            from ddp_lab.config.group_options import check_groups

            check_groups(node["groups"], schema)
    check_optimizer(config.optimizer)
    return config


def check_limits(values: Mapping[str, Any]) -> None:
    """Check that a run has an end, and that the length of its warm-up is set once.

    Args:
        values: The value of each key of the config.

    Raises:
        ConfigError: It has no end, or the length is set twice.
    """
    if values["epochs"] is None and all(values.get(key) is None for key in LIMITS):
        raise ConfigError(
            f"epochs=null: the run would have no end. Set epochs, or one of {', '.join(LIMITS)}"
        )
    steps = values.get("warmup_steps")
    if steps is not None and values["warmup_epochs"]:
        raise ConfigError(
            f"warmup_steps={steps}: warmup_epochs={values['warmup_epochs']:g} is set, too. Use one "
            "of them"
        )


def validate(model: type[M], values: dict[str, Any], prefix: str = "") -> M:
    """Return `values` as an instance of `model`.

    Args:
        model: The schema.
        values: The value of each key.
        prefix: Dotted key of `values`, including the last dot.

    Raises:
        ConfigError: A key or a value is not allowed; the message is about the first one.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, model, values, prefix)) from None


def check_trackers(tracker: str | Sequence[str], tracker_options: Mapping[str, Any]) -> None:
    """Check that the chosen trackers can be constructed.

    Raises:
        ConfigError: a package is missing, a class does not exist or is not a tracker, or an option
            is not allowed.
    """
    chosen = tracker_nodes(tracker, tracker_options)
    known = [*TRACKERS, *(name.partition(".")[0] for name in chosen if name not in TRACKERS)]
    for name in tracker_options:
        if name not in known:
            raise ConfigError(
                unknown_key(
                    f"tracker_options.{name}", tracker_options[name], "tracker_options.", known
                )
            )

    for name, node in chosen.items():
        if name in EXTRAS and find_spec(name) is None:
            raise ConfigError(
                f"tracker={name}: needs the package {name}. Use pip install 'ddp_lab[{name}]', or "
                "tracker=none"
            )

        target = find_target("tracker", node["_target_"])
        missing = []
        if isinstance(target, type):
            missing = [method for method in METHODS if not hasattr(target, method)]
        if missing:
            raise ConfigError(
                f"tracker={name}: the class has no method {' and no '.join(missing)}; a tracker "
                f"has {', '.join(METHODS)}, as ddp_lab.observe.trackers.base.Tracker"
            )

        group = f"tracker_options.{name}"
        validate(
            options(group, node),
            {key: value for key, value in node.items() if key != "_target_"},
            f"{group}.",
        )


def check_metrics(values: Sequence[Any]) -> None:
    """Check that the classes of the key `metrics` can be imported.

    Raises:
        ConfigError: one cannot, or torchmetrics is not installed.
    """
    if values and find_spec("torchmetrics") is None:
        raise ConfigError(
            "metrics: needs the package torchmetrics. Use pip install 'ddp_lab[metrics]', or "
            "metrics=[]"
        )
    find_parts("metrics", values)


def find_parts(key: str, values: Sequence[Any]) -> None:
    """Import the classes of a key that lists those of the user.

    Raises:
        ConfigError: one cannot be imported.
    """
    for value in values:
        find_target(f"{key}._target_", value if isinstance(value, str) else value["_target_"])


def check_optimizer(node: dict[str, Any]) -> None:
    """Construct the optimizer and take a step with a weight and a bias, to run its own checks.

    Then do so with the options of each of its groups.

    Args:
        node: The config group `optimizer`.

    Raises:
        ConfigError: The optimizer rejects its options, or cannot train parameters of any shape.
    """
    take_step(node, f"optimizer._target_={node['_target_']}")
    groups: list[dict[str, Any]] = node.get("groups") or []
    for place, entry in enumerate(groups):
        options_of_group = {
            key: value for key, value in entry.items() if key not in ("match", "lr_scale")
        }
        take_step(node | options_of_group, f"optimizer.groups[{place}]")


def take_step(node: dict[str, Any], key: str) -> None:
    """Construct an optimizer and take a step with a weight and a bias.

    Args:
        node: The config group `optimizer`.
        key: What the message about an error names.

    Raises:
        ConfigError: The optimizer rejects its options, or cannot train parameters of any shape.
    """
    import torch  # takes 1.5 s, so it is imported after all checks that do not need it

    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((1, 1), (1,))]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer = for_cpu(build_optimizer(node)(parameters))
        require_no_closure(optimizer)
        optimizer.step()
    except ConfigError:
        raise
    except Exception as error:  # torch's raise ValueError, TypeError, IndexError or RuntimeError
        options_text = ", ".join(
            f"{name}={value}"
            for name, value in node.items()
            if not name.startswith("_") and name not in OF_GROUPS
        )
        raise ConfigError(f"{key}: {describe_error(error)}; it was given {options_text}") from None


def explain(
    error: ValidationError, model: type[BaseModel], values: Mapping[str, Any], prefix: str = ""
) -> str:
    """Return the message for the first missing key or, if none is missing, the first wrong value.

    Args:
        error: The errors of all keys, in the order of the model's fields.
        model: The model that rejected the values.
        values: The values that were validated.
        prefix: Dotted key of `values`, including the last dot.
    """
    first = min(error.errors(), key=lambda problem: problem["type"] != "missing")
    name, *rest = map(str, first["loc"])
    while rest:
        nested = model.model_fields[name].annotation
        if not is_model(nested):
            break
        model = nested
        values = values[name]
        prefix = f"{prefix}{name}."
        name, *rest = rest

    key = f"{prefix}{name}"
    value = values.get(name)
    if first["type"] == "extra_forbidden":
        set_in_conf = [name for name in values if name in model.model_fields]
        return unknown_key(
            key, value, prefix, list(dict.fromkeys([*set_in_conf, *model.model_fields]))
        )

    field = model.model_fields[name]
    allowed = describe(field.annotation, field.metadata)
    if first["type"] == "missing":
        return f"{key}: is missing; it must be {allowed}"
    from ddp_lab.config.other_names import explain_value

    advice = explain_value(key, value)
    shown = "null" if value is None else value
    return f"{key}={shown}: must be {allowed}{advice and f'. {advice}'}"


def unknown_key(
    key: str, value: Any, prefix: str, names: list[str], config_dir: str | None = None
) -> str:
    """Return the message for a key that does not exist.

    Args:
        key: Full dotted key.
        value: Its value.
        prefix: Dotted key of the group, including the last dot.
        names: The keys that exist in the group.
        config_dir: The directory of the user's own yaml, if there is one.
    """
    from ddp_lab.config.moved import MOVED
    from ddp_lab.config.other_names import explain_name
    from ddp_lab.config.other_options import explain_elsewhere

    if key in MOVED:
        return f"{key}={value}: is now a key of every strategy. Use {MOVED[key]}={value}"
    if advice := explain_name(key, value):
        return f"{key}={value}: there is no such key. {advice}; ddp-lab train --help lists all keys"
    close = difflib.get_close_matches(key.removeprefix(prefix).split(".")[0], names, n=1)
    advice = "".join(f"did you mean {prefix}{name}? " for name in close)
    elsewhere = explain_elsewhere(key, config_dir)
    if elsewhere and (prefix or not close):
        advice = elsewhere
    allowed = ", ".join(f"{prefix}{name}" for name in names)
    return f"{key}={value}: there is no such key; {advice}allowed: {allowed or 'none'}"


def describe(hint: Any, metadata: Iterable[Any] = ()) -> str:
    """Return the allowed values of a type annotation, as the end of "must be ..."."""
    for item in metadata:
        if isinstance(item, Allowed):
            return item.text
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is Annotated:
        return describe(args[0], args[1:])

    if origin in (Union, UnionType):
        # The order is "null or a list, each X": in "a list, each X or null", the null would seem to
        # be an alternative to X.
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
