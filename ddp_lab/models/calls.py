"""How a model is called with a batch: with a tensor, a tuple's arguments, a dict's keywords."""

import inspect
import re
from typing import Any

import torch
from torch import nn

from ddp_lab.data.trees import Tree, leaves

# Of Python's errors about a call: the name of the function, and what is wrong.
OF_ARGUMENTS = re.compile(
    r"^(?P<function>[\w.<>]+)\(\) (?P<problem>(got|missing|takes) .*)$", re.DOTALL
)


def arguments_of(inputs: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and the keywords with which a model gets its inputs."""
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs,), {}


def call(model: nn.Module, inputs: Tree) -> Any:
    """Return the outputs of a model, or of a wrapper around it."""
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    arguments, keywords = arguments_of(inputs)
    return model(*arguments, **keywords)


def describe_shapes(inputs: Tree) -> str:
    """Return the shapes of the inputs of a sample, for a message, given a batch of them."""
    if isinstance(inputs, torch.Tensor):
        return f"inputs of shape {list(inputs.shape[1:])}"
    return "inputs of the shapes " + ", ".join(
        f"{name} {list(tensor.shape[1:])}" for name, tensor in leaves(inputs, "inputs")
    )


def describe_arguments(error: BaseException, model: nn.Module) -> str | None:
    """Return what is wrong with the arguments of a model, for a message; None for another error.

    Args:
        error: raised by a call of the model.
        model: of the user.
    """
    match = OF_ARGUMENTS.match(str(error)) if isinstance(error, TypeError) else None
    forward = type(model).forward
    if match is None or match["function"] != forward.__qualname__:
        return None
    parameters = [*inspect.signature(forward).parameters][1:]
    return (
        f"forward {match['problem']}. Its parameters are {', '.join(parameters) or 'none'}. Inputs "
        "that are a dict are passed as keywords, model(**inputs), a tuple as model(*inputs), and "
        "a tensor as model(inputs): let the dataset or collate_fn return the parts that forward "
        "takes"
    )
