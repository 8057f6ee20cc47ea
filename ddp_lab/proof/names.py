"""Names of the same parameter, in a model and in a wrapper of it."""

from collections.abc import Mapping

from torch import Tensor

# of DistributedDataParallel, Fabric, torch.compile, FSDP1 and activation checkpointing
WRAPPERS = (
    "_forward_module.",
    "_original_module.",
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
    "module.",
)


def plain(name: str) -> str:
    """Return a name without the names that wrappers add."""
    for wrapper in WRAPPERS:
        name = name.replace(f"/{wrapper}", "/").replace(f".{wrapper}", ".").removeprefix(wrapper)
    return name


def with_names_of(
    expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return tensors under the names that one rank uses, if only wrappers make them differ."""
    names = {plain(name): name for name in expected}
    return {
        name if name in expected else names.get(plain(name), name): tensor
        for name, tensor in tensors.items()
    }
