"""Inputs that the model does not support.

torch's error in a forward pass becomes one message, under every strategy.

With an example of a sample the trial finds such mistakes before anything starts.
"""

import dis
import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage], the only base of all such layers
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage], the only base of all convolutions

from ddp_lab.config.causes import is_secondary
from ddp_lab.config.errors import ConfigError, advice, describe_error, place_of
from ddp_lab.models.boundaries import Form
from ddp_lab.models.calls import describe_arguments
from ddp_lab.strategies.base import Strategy

TORCH = Path(torch.__file__).parent
# Of torch's errors about shapes and dtypes, where no layer with a known shape is found.
TEXTS = (
    "shapes cannot be multiplied",
    "must have same reduction dim",
    "must match the size of tensor",
    "same dtype",
    "expected scalar type",
    "Expected tensor for argument",
    "to have 1 dimension",
    "dimension out of range",
    "Dimension out of range",
    "is invalid for input of size",
    "index out of range in self",
    "not implemented for '",
)


class Call(NamedTuple):
    """The innermost module of the model that was running when an error was raised.

    Attributes:
        name: of the module; "" is the model.
        module: the module.
        argument: its first one.
    """

    name: str
    module: nn.Module
    argument: Any


class Dimension(NamedTuple):
    """A dimension of a tensor, and its size."""

    dimension: int
    size: int


@contextmanager
def mistakes_reported(strategy: Strategy) -> Generator[None]:
    """Report that the model does not support the inputs which the body gives it.

    Errors that the user's code raises itself pass as they are.

    Args:
        strategy: after `setup`.

    Raises:
        ConfigError: in place of torch's error.
    """
    with quiet():
        try:
            yield
        except Exception as error:
            message = describe_mistake(error, strategy)
            if message is None:
                raise
            raise ConfigError(message) from None


@contextmanager
def quiet() -> Generator[None]:
    """Leave out what torch logs about shapes that do not fit.

    It logs a traceback before it raises an error about them.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("failed while attempting to run meta")

    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


def describe_mistake(error: BaseException, strategy: Strategy) -> str | None:
    """Return the message about inputs that the model does not support; None for other errors."""
    cause: BaseException | None = error
    if problem := describe_arguments(error, strategy.module):
        return f"the model: {problem}"
    while cause is not None:  # a pipeline raises another error for that of a stage
        call = call_of(cause, strategy)
        if call is not None and is_of_torch(cause):
            problem = describe_problem(call, cause)
            if problem is not None:
                layer = describe_layer(call)
                return (
                    f"the model: {layer} got {describe(call.argument)}{place_of(cause)}, {problem}"
                )
        cause = cause.__cause__
    return None


def call_of(error: BaseException, strategy: Strategy) -> Call | None:
    """Return the innermost call of a module of the model; None if none was running."""
    names = {module: name for name, module in strategy.module.named_modules()}
    innermost: Call | None = None
    for step in steps_of(error.__traceback__):
        code = step.tb_frame.f_code
        values = step.tb_frame.f_locals
        module = values.get("self")
        if isinstance(module, nn.Module) and module in names and code.co_argcount > 1:
            innermost = Call(names[module], module, values.get(code.co_varnames[1]))
    return innermost


def is_of_torch(error: BaseException) -> bool:
    """Return whether an error is torch's own, and not about another rank or the size of a batch."""
    *_, last = steps_of(error.__traceback__)
    code = last.tb_frame.f_code
    if is_secondary(error) or advice(str(error)):
        return False
    if TORCH in Path(code.co_filename).parents:
        return True
    # An operation of torch has no frame of its own; a statement of the user's that raises an error
    # is known by its instruction.
    raises = any(
        each.offset == last.tb_lasti and each.opname == "RAISE_VARARGS"
        for each in dis.get_instructions(code)
    )
    return isinstance(error, (RuntimeError, IndexError)) and not raises


def steps_of(first: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the entries of a traceback, the innermost one last."""
    while first is not None:
        yield first
        first = first.tb_next


def describe_problem(call: Call, error: BaseException) -> str | None:
    """Return what is wrong with the argument of a module, and what to do; None for other errors."""
    argument = call.argument
    module = call.module
    if isinstance(argument, torch.Tensor):
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and "index out of range" in str(
            error
        ):
            last = module.num_embeddings - 1
            return (
                f"but expects numbers from 0 to {last}. Correct the inputs, or use a larger "
                "embedding"
            )

        if "type" in str(error) and (dtype := other_dtype(argument, module)):
            name = str(dtype).removeprefix("torch.")
            return f"but expects {name}. {advice_on(argument.dtype, dtype)}"
        place = expected_dimension(module)
        if place is not None and argument.shape[place.dimension :][:1] != (place.size,):
            shape = f"[..., {place.size}]" if place.dimension == -1 else f"[b, {place.size}, ...]"
            return f"but expects {shape}. Use inputs that the model supports, or correct the model"

    if any(text in str(error) for text in TEXTS):
        return (
            f"and fails: {describe_error(error)}. Use inputs that the model supports, or correct "
            "the model"
        )
    return None


def other_dtype(argument: torch.Tensor, module: nn.Module) -> torch.dtype | None:
    """Return the dtype that a module expects in place of its argument's; None if that fits."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return torch.int64 if argument.is_floating_point() else None
    # others may take integers beside their parameters
    is_layer = type(module).forward.__module__.startswith("torch.")
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if (
        len(dtypes) != 1
        or argument.dtype in dtypes
        or not (is_layer or argument.is_floating_point())
    ):
        return None
    return dtypes.pop()


def advice_on(dtype: torch.dtype, expected: torch.dtype) -> str:
    """Return what to do about an argument of another dtype than a module expects."""
    convert = f"Convert the inputs, for example by inputs.to({expected})"
    both_float = dtype.is_floating_point and expected.is_floating_point
    return f"{convert}, or the model, for example by model.to({dtype})" if both_float else convert


def expected_dimension(module: nn.Module) -> Dimension | None:
    """Return the dimension of its argument that a layer of torch fixes; None for other modules."""
    if isinstance(module, nn.Linear):
        return Dimension(-1, module.in_features)
    if isinstance(module, nn.RNNBase):
        return Dimension(-1, module.input_size)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return Dimension(-1, module.normalized_shape[-1])
    if isinstance(module, nn.MultiheadAttention):
        return Dimension(-1, module.embed_dim)
    if isinstance(module, _ConvNd):
        return Dimension(1, module.in_channels)
    if isinstance(module, _NormBase):
        return Dimension(1, module.num_features)
    return Dimension(1, module.num_channels) if isinstance(module, nn.GroupNorm) else None


def describe_layer(call: Call) -> str:
    """Return name, class and options of a module, for example "0, Linear(in_features=8, ...)"."""
    # whose classes a strategy gives to layers
    replaced = ("ddp_lab.strategies", "ddp_lab.speed", "torch.distributed")
    kinds = [
        kind.__name__
        for kind in type(call.module).__mro__
        if not kind.__module__.startswith(replaced)
    ]
    described = f"{kinds[0]}({call.module.extra_repr()})"
    return f"{call.name}, {described}," if call.name else described


def describe(argument: Any) -> str:
    """Return the shape and the dtype of an argument."""
    return str(Form.of(argument)) if isinstance(argument, torch.Tensor) else type(argument).__name__
