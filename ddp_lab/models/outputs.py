"""What a model returns: a tensor, or a tuple, a dict or an object of tensors.

Models of other libraries often return the latter.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.models.real_view import real_view


def require_tensor(outputs: object, source: str = "the model") -> torch.Tensor:
    """Return the outputs of a model.

    Args:
        outputs: what its `forward` has returned.
        source: begins the message.

    Raises:
        ConfigError: they are no tensor.
    """
    if isinstance(outputs, torch.Tensor):
        return outputs
    content, place = describe_content(outputs)
    raise ConfigError(
        f"{source} returns {content}, but expected is one tensor [b, ...] for b samples. Wrap it "
        f"in a module of a few lines, whose forward ends with `return self.model(inputs){place}`"
    )


def require_samples(shape: tuple[int, ...], samples: int) -> None:
    """Check that a model has returned outputs of all samples.

    Args:
        shape: of the outputs.
        samples: number of samples in its inputs.

    Raises:
        ConfigError: they have another first dimension, or none.
    """
    if shape[:1] != (samples,):
        raise ConfigError(
            f"the model: it must return a tensor [{samples}, ...] for {count(samples, 'sample')}, "
            "got "
            f"{list(shape)}. Correct its forward: a mean over the samples belongs into the loss"
        )


def map_outputs(function: Callable[[torch.Tensor], torch.Tensor], outputs: Any) -> Any:
    """Return outputs of the same types with the results of a function of each tensor.

    Args:
        function: of a tensor.
        outputs: a tensor, or a tuple, list, dict or object of tensors. Of an object that is no
            dataclass, only attributes that are tensors are looked at.
    """
    if isinstance(outputs, torch.Tensor):
        return function(outputs)
    if isinstance(outputs, (tuple, list)):
        values = [map_outputs(function, value) for value in outputs]
        return type(outputs)(*values) if hasattr(outputs, "_fields") else type(outputs)(values)
    if isinstance(outputs, Mapping):
        mapping: Any = copy.copy(outputs)
        for key, value in outputs.items():
            mapping[key] = map_outputs(function, value)
        return mapping

    attributes = attributes_of(outputs)
    if not attributes:
        return outputs
    result = copy.copy(outputs)
    for name, value in attributes.items():
        object.__setattr__(result, name, map_outputs(function, value))
    return result


def attributes_of(outputs: Any) -> dict[str, Any]:
    """Return the attributes of an object that may contain tensors, by name."""
    if dataclasses.is_dataclass(outputs):
        return {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    attributes = getattr(outputs, "__dict__", {})
    return {name: value for name, value in attributes.items() if isinstance(value, torch.Tensor)}


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """Return all tensors of the outputs of a model."""
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_outputs(note, outputs)
    return tensors


def sum_of(outputs: Any) -> torch.Tensor:
    """Return the sum of all outputs that need a gradient, []."""
    parts = [
        real_view(tensor).float().sum() for tensor in tensors_of(outputs) if tensor.requires_grad
    ]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def without_padding(outputs: Any, samples: int, num_valid: int) -> Any:
    """Return the outputs of the first samples.

    Args:
        outputs: of a batch, of which no part is one tensor.
        samples: of the batch.
        num_valid: number of samples that are no padding; 0: the outputs stay as they are, and must
            not count.

    Raises:
        ConfigError: a tensor has no row for each sample.
    """
    if num_valid in (0, samples):
        return outputs

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[:1] != (samples,):
            raise ConfigError(
                f"the model returns {describe_content(outputs)[0]}, of which a tensor is "
                f"{list(tensor.shape)} and not [{samples}, ...]: of the {samples} samples of "
                f"this first batch {samples - num_valid} must be cut off as padding, which is not "
                "possible. "
                "Use a batch_size of at most the size of the dataset"
            )
        return tensor[:num_valid]

    return map_outputs(cut, outputs)


def describe_content(outputs: object) -> tuple[str, str]:
    """Return what outputs that are no tensor contain, and code for the first tensor of them."""
    kind = type(outputs).__name__
    if isinstance(outputs, (tuple, list)) and not hasattr(outputs, "_fields"):
        places = [index for index, value in enumerate(outputs) if isinstance(value, torch.Tensor)]
        return f"a {kind} of {len(outputs)}", f"[{places[0] if places else 0}]"
    if isinstance(outputs, Mapping):
        named = dict(outputs)
        place = '["{}"]'
    else:
        fields = getattr(outputs, "_fields", None) or getattr(outputs, "__dict__", {})
        named = {name: getattr(outputs, name) for name in fields}
        place = ".{}"
    tensors = [str(name) for name, value in named.items() if isinstance(value, torch.Tensor)]
    content = f" with {', '.join(map(str, named))}" if named else ""
    return f"{kind}{content}", place.format(tensors[0]) if tensors else ""
