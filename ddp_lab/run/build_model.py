"""The model of a run and what it is trained for, constructed from the config."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig

from ddp_lab.config.build import call_target, construct, plain
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.data.dataset import Dataset
from ddp_lab.models.make import ModelSpec
from ddp_lab.run.data_record import input_shape_of
from ddp_lab.tasks.base import LossFunction, Task
from ddp_lab.tasks.classification import Classification, CrossEntropy

# functions that return models of other libraries, by model.name
BY_NAME = {
    f"ddp_lab.models.{library}_models.{library}_model"
    for library in ("torchvision", "timm", "transformers")
}
# keys of the group that are not passed to a constructor
OF_WEIGHTS = ("weights", "weights_except", "init")
OWN_LOSS = "ddp_lab.tasks.build.default"  # loss=default: the task's own one


def model_spec(node: DictConfig | dict[str, Any], shape: Mapping[str, Any]) -> ModelSpec:
    """Return how the model that `_target_` names is constructed.

    Args:
        node: the config group `model`; OF_WEIGHTS are not passed to the constructor.
        shape: the arguments that follow from the data, for example in_channels and num_classes
            (`Dataset.model_shape`). Only those are passed that are parameters of the class or
            function.

    Raises:
        ConfigError: an option follows from the data.
    """
    target = str(node["_target_"])
    function = get_object(target)
    accepted = inspect.signature(function).parameters
    options = {key: value for key, value in plain(node).items() if key not in OF_WEIGHTS}
    if target in BY_NAME:
        options["_convert_"] = "all"  # lists and dicts in place of Hydra's own classes
    passed = {name: value for name, value in shape.items() if name in accepted}
    for name in passed.keys() & options.keys():
        raise ConfigError(
            f"model.{name}={options[name]}: follows from the data, where it is {shape[name]}; "
            "leave it out"
        )

    return ModelSpec(
        make=partial(call_target, options, **passed),
        target=target,
        name=str(node["name"]) if target in BY_NAME else None,
        input_shape=input_shape_of(shape),
        of_tokens="vocabulary" in shape,
        num_classes=shape.get("num_classes", 0),
        weights=node.get("weights"),
        by_block=node.get("init") == "by_block",
        weights_except=tuple(map(str, node.get("weights_except") or ())),
    )


def make_task(cfg: DictConfig, dataset: Dataset) -> Task:
    """Return what the model is trained for, on the CPU."""
    mixed = cfg.mixup > 0 or cfg.cutmix > 0
    task = get_object(cfg.task["_target_"])
    if not issubclass(task, Classification):
        if mixed:
            raise ConfigError(
                f"mixup={cfg.mixup:g}, cutmix={cfg.cutmix:g}: are for task=classification; use "
                "mixup=0 cutmix=0"
            )
        loss = build_loss(cfg.loss)
        if isinstance(loss, CrossEntropy):
            raise ConfigError(
                "loss=cross_entropy: is for task=classification, got "
                f"task._target_={cfg.task['_target_']}. Use loss=default, the task's own loss, or "
                "loss=own"
            )
        return construct_task(cfg.task, task, loss)

    is_tokens = "vocabulary" in dataset.model_shape()
    if is_tokens or not dataset.classes:
        advice = "use task=tokens" if is_tokens else "set data.num_classes, or choose another task"
        raise ConfigError(
            f"task=classification: needs a dataset with a class for each sample; {advice}"
        )
    loss = build_loss(cfg.loss, len(dataset.classes), mixed)
    return construct("task", cfg.task, loss=loss)


def construct_task(node: DictConfig, kind: type[Task], loss: LossFunction | None) -> Task:
    """Construct a task, whose class may be one of the user's with a constructor of its own.

    Args:
        node: the config group `task`.
        kind: its class.
        loss: in place of the task's own; None: there is none.

    Raises:
        ConfigError: the constructor fails, has no parameter for the loss, or does not pass
            head_chunks on.
    """
    parameters = inspect.signature(kind).parameters.values()
    accepts_loss = any(each.name == "loss" or each.kind is each.VAR_KEYWORD for each in parameters)
    if loss is not None and not accepts_loss:
        raise ConfigError(
            f"task._target_={node['_target_']}: the constructor of {kind.__name__} has no "
            "parameter loss, so that another loss has no place. Add it, and call "
            "super().__init__(loss); or use loss=default, the task's own loss"
        )
    task = construct("task", node, **({"loss": loss} if accepts_loss else {}))
    chunks = node.get("head_chunks", task.head_chunks)
    if chunks != task.head_chunks:
        raise ConfigError(
            f"task.head_chunks={chunks}: has no effect, because the constructor of {kind.__name__} "
            f"does not pass it on, and head_chunks is {task.head_chunks}. Call "
            "super().__init__(loss, head_chunks) there"
        )
    return task


def build_loss(
    node: DictConfig | dict[str, Any], num_classes: int | None = None, mixed: bool = False
) -> LossFunction | None:
    """Construct the loss that `_target_` names: a class or a function.

    A class is called once; a function is the loss itself.

    Either is given reduction="none" if it has a parameter of that name.

    Args:
        node: the config group `loss`.
        num_classes: number of classes of the dataset; None: the task is not classification, and the
            loss is not tried.
        mixed: whether it gets mixed targets.

    Raises:
        ConfigError: the constructor fails, or the loss is not one for these data
            (`check_loss_function`).
    """
    if node["_target_"] == OWN_LOSS:
        return None
    key = f"loss._target_={node['_target_']}"
    target = get_object(node["_target_"])
    arguments = {"reduction": "none"} if "reduction" in inspect.signature(target).parameters else {}
    try:
        built = call_target(node, **arguments, _partial_=not inspect.isclass(target))
    except Exception as error:
        raise ConfigError(f"{key}: cannot be constructed: {describe_error(error)}") from None
    if not isinstance(built, CrossEntropy):
        from ddp_lab.tasks.build import check_loss_function

        check_loss_function(built, key, num_classes, mixed)
    return built
