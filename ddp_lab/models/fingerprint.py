"""What two blocks must have in common to compute the same function of their parameters."""

from typing import Any

from torch import nn


def fingerprint(block: nn.Module) -> tuple[Any, ...]:
    """Return what determines the computation of a block: its classes and their options, but for names.

    Blocks of which an attribute is anything but a plain value count as different.
    """
    found: list[Any] = []
    for path, module in block.named_modules():
        found += [path, type(module)]
        for key, value in vars(module).items():
            if key == "name" or key.startswith("_"):
                continue
            plain = isinstance(value, int | float | str | tuple | None)
            found.append((key, str(value) if plain else id(value)))
    return (*found, *((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in block.parameters()))
