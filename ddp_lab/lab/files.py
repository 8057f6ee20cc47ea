"""Files that rank 0 writes for all ranks."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ddp_lab.config.errors import ConfigError
from ddp_lab.world.runtime import Runtime


def on_rank_0(runtime: Runtime, path: str | Path, write: Callable[[], None]) -> None:
    """Call `write` on rank 0, and return on all ranks when it is done. Collective.

    Raises:
        ConfigError: `path` could not be written; on all ranks.
    """

    def attempt() -> None:
        try:
            write()
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from None

    runtime.agree("write", attempt)


def write_weights(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file under a temporary name, and rename it."""
    # Copies, because tensors that share memory (tied weights) are not allowed in the file.
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    save_file(copies, temporary, {"format": "pt"})
    os.replace(temporary, path)
