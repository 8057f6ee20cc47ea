"""Collectives of one rank of a fake group, counted.

Collectives of a fake group do nothing, so the numbers are wrong, but their sizes are right. With n
elements and W ranks, a rank sends at least 2 (W - 1) / W n for an all_reduce, and half of it for an
all_gather or a reduce_scatter of n.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case import config_of
from small_networks import make_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddp_lab.config.build import call_target
from ddp_lab.strategies.base import Strategy
from ddp_lab.world.runtime import Runtime

SAMPLES = 8  # of a local batch
KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "gather": "gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "send": "send",
    "recv_": "receive",
}


class Traffic(TorchDispatchMode):
    """Counts calls, elements and bytes of each kind of collective, by the larger side."""

    def __init__(self):
        super().__init__()
        self.calls = Counter[str]()
        self.elements = Counter[str]()
        self.bytes = Counter[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        sends_nothing = any(word in name for word in ("wait_tensor", "wrap_tensor", "barrier"))
        if name.startswith(("c10d", "_c10d_functional")) and not sends_nothing:
            bare = (
                name.split(".")[1]
                .replace("all_reduce", "allreduce")
                .replace("all_gather", "allgather")
            )
            kind = next(kind for start, kind in KINDS.items() if start in bare)
            out = function(*args, **kwargs or {})
            leaves = tree_leaves(args)
            if name.startswith("_c10d_functional"):
                leaves += tree_leaves(out)
            tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
            self.calls[kind] += 1
            self.elements[kind] += max(each.numel() for each in tensors)
            self.bytes[kind] += max(each.nbytes for each in tensors)
            return out
        return function(*args, **kwargs or {})


@contextmanager
def world(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int, precision: str = "float32"
) -> Iterator[Runtime]:
    """Be one rank of a world without the others."""
    places = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    for key, value in places.items():
        monkeypatch.setenv(key, str(value))
    with Runtime("cpu", precision) as runtime:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        yield runtime


def step(strategy: Strategy, accumulate: int) -> None:
    shape = strategy.example.shape[1:]
    images = torch.ones(SAMPLES, *shape)
    targets = torch.zeros(SAMPLES, dtype=torch.int64)
    strategy.forward_backward(images, targets, SAMPLES * strategy.dp_size, accumulate)


def set_up(case: str, runtime: Runtime, name: str, accumulate: int) -> Strategy:
    model = make_model(name, 0)
    strategy: Any = call_target(config_of(case).strategy, runtime)
    example = torch.empty(2, *model.input_shape, dtype=model.input_dtype, device="meta")
    strategy.expect(example=example)
    strategy.partition(model, SAMPLES // accumulate)
    strategy.setup(model)
    strategy.train()
    return strategy


def second_step(strategy: Strategy, accumulate: int) -> Traffic:
    step(strategy, accumulate)
    for parameter in strategy.module.parameters():
        parameter.grad = None
    with Traffic() as counted:
        step(strategy, accumulate)
    return counted


def traffic(
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    ranks: int,
    rank: int = 0,
    accumulate: int = 1,
    name: str = "lenet",
) -> tuple[Traffic, Strategy, int]:
    """Return the traffic of the second step, the strategy, and the complete model's elements."""
    size = sum(parameter.numel() for parameter in make_model(name, 0).parameters())
    with world(monkeypatch, rank, ranks) as runtime:
        strategy = set_up(case, runtime, name, accumulate)
        return second_step(strategy, accumulate), strategy, size


def padded_size(name: str, shards: int) -> int:
    """Return the elements of a model's tensors, cut along their first dimension, with padding."""
    sizes = [list(parameter.shape) for parameter in make_model(name, 0).parameters()]
    return sum(-(-rows // shards) * shards * math.prod(rest) for rows, *rest in sizes)
