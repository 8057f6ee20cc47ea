"""The layout in which transformers and PEFT save a model, for what a strategy has divided."""

import importlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_lab.models.trial import meta_copy

# files that a directory of an earlier save may have more of
WRITTEN = ("model*.safetensors", "model*.json", "adapter_model*")


class Pretrained:
    """A model that can save itself as its library does: by a method `save_pretrained`.

    A strategy changes the classes and parameters of the model. What is saved is therefore described
    by a copy without data, from before that.

    Args:
        model: complete, before the strategy gets it.
    """

    def __init__(self, model: nn.Module):
        self._copy: Any = meta_copy(model)

    @classmethod
    def of(cls, model: nn.Module) -> "Pretrained | None":
        """Return how a model of transformers or PEFT is saved; None of other models."""
        return cls(model) if callable(getattr(model, "save_pretrained", None)) else None

    @property
    def names(self) -> set[str]:
        """Names of the tensors that are saved: of PEFT those of the adapters, else all."""
        tensors: dict[str, torch.Tensor] = self._copy.state_dict()
        if not hasattr(self._copy, "peft_config"):
            return {*tensors}
        peft = importlib.import_module("peft")  # which renames them
        saved = {
            id(tensor)
            for adapter in self._copy.peft_config
            for tensor in peft.get_peft_model_state_dict(
                self._copy, state_dict=tensors, adapter_name=adapter
            ).values()
        }
        return {name for name, tensor in tensors.items() if id(tensor) in saved}

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        """Write config and weights into a folder, whose earlier weights they replace.

        Args:
            folder: for config.json and model.safetensors, in several files with an index if it is
                large; of PEFT for adapter_config.json and adapter_model.safetensors.
            weights: full tensors, by `names`.
        """
        temporary = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        self._copy.save_pretrained(temporary, state_dict=self._tied(weights))
        folder.mkdir(parents=True, exist_ok=True)
        written = {path.name for path in temporary.iterdir()}
        for pattern in WRITTEN:
            for path in folder.glob(pattern):
                if path.name not in written:
                    path.unlink()
        for path in temporary.iterdir():
            if path.is_dir():
                shutil.rmtree(folder / path.name, ignore_errors=True)
            os.replace(path, folder / path.name)
        temporary.rmdir()

    def _tied(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return weights in which a parameter of several names is one tensor, saved once."""
        first: dict[int, torch.Tensor] = {}
        tied: dict[str, torch.Tensor] = {}
        for name, parameter in self._copy.state_dict(keep_vars=True).items():
            if name in weights:
                tied[name] = first.setdefault(id(parameter), weights[name])
        return tied
