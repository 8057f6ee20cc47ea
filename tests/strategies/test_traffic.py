"""The traffic that docs/strategies.md promises, counted: the collectives of one rank of a fake group.

Collectives of a fake group do nothing, so the numbers are wrong, but their sizes are right. With n
elements and W ranks, a rank sends at least 2 (W - 1) / W n for an all_reduce, and half of it for an
all_gather or a reduce_scatter of n.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import config_of, make_model

from ddp_lab.config.build import build
from ddp_lab.strategies.base import Strategy
from ddp_lab.world.runtime import Runtime

SAMPLES = 8  # of a local batch
KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "send": "send",
    "recv_": "receive",
}


class Traffic(TorchDispatchMode):
    """Counts calls and elements of each kind of collective: of the larger side of gathers and scatters."""

    def __init__(self):
        super().__init__()
        self.calls, self.elements = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name.startswith(("c10d", "_c10d_functional")) and "wait" not in name and "barrier" not in name:
            bare = name.split(".")[1].replace("all_reduce", "allreduce").replace("all_gather", "allgather")
            kind = next(kind for start, kind in KINDS.items() if start in bare)
            sizes = [each.numel() for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
            out = function(*args, **kwargs or {})
            if name.startswith("_c10d_functional"):
                sizes += [each.numel() for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
            self.calls[kind] += 1
            self.elements[kind] += max(sizes)
            return out
        return function(*args, **kwargs or {})


@contextmanager
def world(monkeypatch, rank: int, size: int) -> Iterator[Runtime]:
    """Be one rank of a world without the others."""
    places = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    for key, value in places.items():
        monkeypatch.setenv(key, str(value))
    with Runtime("cpu") as runtime:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        yield runtime


def step(strategy: Strategy, accumulate: int) -> None:
    shape = strategy.input_shape
    images, targets = torch.ones(SAMPLES, *shape), torch.zeros(SAMPLES, dtype=torch.int64)
    strategy.forward_backward(images, targets, SAMPLES * strategy.dp_size, accumulate)


def traffic(
    monkeypatch, case: str, ranks: int, rank: int = 0, accumulate: int = 1, name: str = "lenet"
) -> tuple[Traffic, Strategy, int]:
    """Return the traffic of the second step, the strategy, and the elements of the parameters."""
    with world(monkeypatch, rank, ranks) as runtime:
        model = make_model(name, 0)
        size = sum(parameter.numel() for parameter in model.parameters())
        strategy: Any = build(config_of(case).strategy, runtime)
        strategy.input_shape, strategy.input_dtype = model.input_shape, model.input_dtype
        strategy.partition(model, SAMPLES // accumulate)
        strategy.setup(model)
        strategy.train()
        step(strategy, accumulate)
        for parameter in strategy.module.parameters():
            parameter.grad = None
        with Traffic() as found:
            step(strategy, accumulate)
        return found, strategy, size


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(
    ("case", "calls"),
    [
        ("ddp", 1),
        ("ddp bucket_cap_mb=0.01", None),
        ("scratch algorithm=flat", 1),
        ("scratch algorithm=per_tensor", 8),
        ("scratch algorithm=bucketed", 3),
    ],
)
def test_data_parallelism_sums_every_gradient_once_in_a_step(case, calls, accumulate, monkeypatch):
    found, _, size = traffic(monkeypatch, case, 4, accumulate=accumulate)
    assert found.elements == {"all_reduce": size}
    assert calls is None or found.calls == {"all_reduce": calls}


def probe(monkeypatch, case, ranks, **more):
    found, strategy, size = traffic(monkeypatch, case, ranks, **more)
    print(case, more, size, dict(found.calls), dict(found.elements))


@pytest.mark.parametrize(
    "case",
    ["fsdp", "fsdp reshard_after_forward=false", "mesh shard=null", "mesh shard=1", "mesh shard=2",
     "tp", "mesh tp=2", "mesh tp=2 sequence_parallel=true", "pipeline", "pipeline schedule=gpipe", "ddp_pipeline", "mesh pp=2 shard=1", "mesh pp=2 shard=2",
     "ddp find_unused_parameters=true", "scratch find_unused_parameters=true", "scratch algorithm=ring", "scratch algorithm=star"],
)
def test_probe(case, monkeypatch):
    for accumulate in (1, 2):
      for rank in (0, 7):
       probe(monkeypatch, case, 8, accumulate=accumulate, name="vit" if "mesh" in case or "fsdp" in case else "lenet", rank=rank)
