"""Validation of a composed config against its schema."""

from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ValidationError

from ddp_lab.config.build import build, for_cpu, takes_fused
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.config.messages import explain
from ddp_lab.config.options import GROUPS, options
from ddp_lab.config.schema import OptimizerConfig, RunConfig

M = TypeVar("M", bound=BaseModel)


def check(cfg: DictConfig) -> RunConfig:
    """Validate the config and return it as a frozen object of plain values; the groups with a `_target_` remain dicts.

    Raises:
        ConfigError: A key is missing or does not exist, or a value has the wrong type or is out of range.
    """
    values = cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=True))
    refuse_test_as_criterion(values)
    config = validate(RunConfig, values)
    groups = {"data.dataset": config.data.dataset, **{name: getattr(config, name) for name in GROUPS if "." not in name}}
    # The optimizer's ranges are checked first, because looking up the constructors imports torch, which takes 1.5 s.
    validate(OptimizerConfig, config.optimizer, "optimizer.")
    for group, node in groups.items():
        given = {key: value for key, value in node.items() if not key.startswith("_") and value != "???"}
        schema = options(group, node)
        if group == "optimizer" and not takes_fused(node):
            del given["fused"]
        validate(schema, given, f"{group}.")
    check_optimizer(config.optimizer)
    return config


def refuse_test_as_criterion(values: dict[str, Any]) -> None:
    """Check that neither the best checkpoint, as in earlier versions, nor a sweep is to be chosen by the test set.

    Raises:
        ConfigError: one is.
    """
    best, optimize = (values.get("checkpoint") or {}).get("best"), values.get("optimize")
    for key, value in (("checkpoint.best", best), ("optimize", optimize)):
        if value == "test_loss" or (value, key) == ("test_accuracy", "checkpoint.best"):
            raise ConfigError(
                f"{key}={value}: the test set chooses nothing. Use {key}=val{str(value)[4:]} with a validation set: "
                "data.val_fraction=0.1, or with data=folder a folder val/"
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


def check_optimizer(node: dict[str, Any]) -> None:
    """Construct the optimizer and take a step with a single weight, to run its own checks.

    Args:
        node: The config group `optimizer`.

    Raises:
        ConfigError: The optimizer rejects its options, or cannot train parameters of any shape.
    """
    import torch  # takes 1.5 s, so it is imported after all checks that do not need it

    make = build(node)
    matrix, bias = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((1, 1), (1,)))
    try:
        make([matrix])
    except Exception as error:  # torch's raise ValueError, TypeError, IndexError or RuntimeError
        given = ", ".join(f"{key}={value}" for key, value in node.items() if not key.startswith("_"))
        raise ConfigError(f"optimizer: {describe_error(error)}; it was given {given}") from None
    bias.grad = torch.zeros(1)
    try:
        for_cpu(make([bias])).step()
    except Exception as error:
        raise ConfigError(
            f"optimizer._target_={node['_target_']}: cannot train a bias: {describe_error(error)}. Use an optimizer that takes "
            "parameters of any shape with dense gradients, and whose step() needs no closure, such as torch.optim.AdamW"
        ) from None
