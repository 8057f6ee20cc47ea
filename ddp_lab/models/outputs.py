"""What a model returns: a tensor. Models of other libraries often return a dict, an object or a tuple that contains it."""

from collections.abc import Mapping

import torch

from ddp_lab.config.errors import ConfigError


def require_tensor(outputs: object, what: str = "the model") -> torch.Tensor:
    """Return the outputs of a model.

    Args:
        outputs: what its `forward` has returned.
        what: begins the message.

    Raises:
        ConfigError: they are no tensor.
    """
    if isinstance(outputs, torch.Tensor):
        return outputs
    content, place = describe_content(outputs)
    raise ConfigError(
        f"{what} returns {content}, but expected is one tensor [b, ...] for b samples. Wrap it in a module of a few lines, "
        f"whose forward ends with `return self.model(inputs){place}`"
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
            f"the model: it must return a tensor [{samples}, ...] for {samples} samples, got {list(shape)}. "
            "Correct its forward: a mean over the samples belongs into the loss"
        )


def describe_content(outputs: object) -> tuple[str, str]:
    """Return what outputs that are no tensor contain, and the code that takes the first tensor out of them."""
    kind = type(outputs).__name__
    if isinstance(outputs, (tuple, list)) and not hasattr(outputs, "_fields"):
        found = [index for index, value in enumerate(outputs) if isinstance(value, torch.Tensor)]
        return f"a {kind} of {len(outputs)}", f"[{found[0] if found else 0}]"
    if isinstance(outputs, Mapping):
        named, place = dict(outputs), '["{}"]'
    else:
        fields = getattr(outputs, "_fields", None) or getattr(outputs, "__dict__", {})
        named, place = {name: getattr(outputs, name) for name in fields}, ".{}"
    tensors = [str(name) for name, value in named.items() if isinstance(value, torch.Tensor)]
    content = f" with {', '.join(map(str, named))}" if named else ""
    return f"{kind}{content}", place.format(tensors[0]) if tensors else ""
