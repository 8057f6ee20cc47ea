"""Copies of a block that are traced: of fake tensors, or with values, of the sizes that one rank holds."""

import copy
import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ddp_lab.strategies.batch_norm import is_batch_norm


@contextmanager
def fake_mode() -> Generator[Any]:
    """Let tensors have shapes and no memory. Operations that fail raise their error, which torch does not log as well."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # loads 300 modules

    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        log.disabled = before


def fake_copy(block: nn.Module, sizes: dict[str, torch.Size], dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of a block whose parameters and buffers are fake. Call it within the fake mode.

    Args:
        sizes: the shape of each parameter.
        dtype: of the parameters, but for those of BatchNorm, which stay as they are; None: their own.
    """
    memo: dict[int, Any] = {id(tensor): torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in block.buffers()}
    for name, tensor, kind in with_dtypes(block, dtype):
        memo[id(tensor)] = nn.Parameter(torch.empty(sizes[name], dtype=kind), requires_grad=tensor.requires_grad)
    return copy.deepcopy(block, memo)


def real_copy(block: nn.Module, sizes: dict[str, torch.Size], dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of a block on the CPU with the first elements of its parameters. The arguments are as above."""
    memo: dict[int, Any] = {}
    for name, tensor, kind in with_dtypes(block, dtype):
        part = tensor.detach()[tuple(map(slice, sizes[name]))].to(kind, copy=True).contiguous()
        memo[id(tensor)] = nn.Parameter(part, requires_grad=tensor.requires_grad)
    return copy.deepcopy(block, memo)


def with_dtypes(block: nn.Module, dtype: torch.dtype | None) -> list[tuple[str, nn.Parameter, torch.dtype]]:
    """Return the name and the dtype of each parameter of a copy. The arguments are as above."""
    norms = {id(tensor) for layer in filter(is_batch_norm, block.modules()) for tensor in layer.parameters()}
    return [
        (name, tensor, tensor.dtype if dtype is None or id(tensor) in norms else dtype)
        for name, tensor in block.named_parameters()
    ]
