"""Construction of the object that a config group describes."""

import inspect
from functools import partial
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig


def build(node: DictConfig | dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call the class or function that `_target_` names, with hydra.utils.instantiate, and return the result.

    `fused: null` is not passed to a constructor without this option: some optimizers do not have it, and the overrides of a
    launch line cannot delete a null. An exception of the constructor is raised unchanged. A partial is returned as a plain
    `functools.partial`.

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
    if isinstance(built, partial):  # Hydra 1.3.8's own partial costs 0.1 ms per call, and every training step makes one
        return partial(built.func, *built.args, **built.keywords)
    return built


def for_cpu(optimizer: Any) -> Any:
    """Return an optimizer that is only tried on the CPU, without `capturable`, which CPUs do not have."""
    for group in optimizer.param_groups:
        group |= {"capturable": False} if "capturable" in group else {}
    return optimizer


def takes_fused(node: DictConfig | dict[str, Any]) -> bool:
    """Return whether the constructor has the option `fused` of a config group, if it is null there; else True."""
    return node.get("fused", False) is not None or "fused" in inspect.signature(get_object(node["_target_"])).parameters
