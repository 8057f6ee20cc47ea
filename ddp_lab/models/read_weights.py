"""Layers whose weights are read outside of their own forward pass, so that a sharded layer cannot replace them.

nn.MultiheadAttention, for example, never calls its out_proj: it passes the weight to a function of its own.
"""

import copy
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ddp_lab.models.chain import Chain
from ddp_lab.models.trial import LARGE, meta_copy


class Reads(TorchFunctionMode):
    """Finds the layers of which a function that returns tensors gets a parameter while the layer's forward pass is not running.

    Args:
        layers: by name.

    Attributes:
        found: the names of such layers.
    """

    def __init__(self, layers: Mapping[str, nn.Module]):
        super().__init__()
        self.found, self._running, self._names = set[str](), list[str](), dict[int, set[str]]()
        for name, layer in layers.items():
            for parameter in layer.parameters():
                self._names.setdefault(id(parameter), set()).add(name)  # tied layers share one
            layer.register_forward_pre_hook(lambda *_, name=name: self._running.append(name))
            layer.register_forward_hook(lambda *_, name=name: self._running.remove(name))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(value, torch.Tensor) for value in tree_leaves(result)):  # and not a shape or a dtype
            for value in tree_leaves((args, kwargs)):
                names = self._names.get(id(value), set())
                self.found |= names if names.isdisjoint(self._running) else set()
        return result


def read_outside(model: Chain, names: Iterable[str]) -> set[str]:
    """Return the names of the layers whose weights other modules read. An image passes through a copy of the model.

    Args:
        model: on the CPU or on the meta device.
        names: of the layers in question. Of those after a module that fails on the meta device, where large models are
            tried, nothing is known.
    """
    small = sum(parameter.numel() for parameter in model.parameters()) <= LARGE
    on_meta = any(parameter.is_meta for parameter in model.parameters()) or not small
    copied = meta_copy(model) if on_meta else copy.deepcopy(model)
    reads = Reads({name: copied.get_submodule(name) for name in names})
    with suppress(Exception), torch.random.fork_rng([]), torch.no_grad(), reads:
        copied.eval()(model.example(1, "meta" if on_meta else "cpu"))
    return reads.found
