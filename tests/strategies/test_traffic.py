"""The traffic that docs/strategies.md promises, counted: the collectives of one rank of a fake group.

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
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import config_of, make_model
from worlds import run_world

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


def set_up(case: str, runtime: Runtime, name: str, accumulate: int) -> Strategy:
    model = make_model(name, 0)
    strategy: Any = build(config_of(case).strategy, runtime)
    strategy.input_shape, strategy.input_dtype = model.input_shape, model.input_dtype
    strategy.partition(model, SAMPLES // accumulate)
    strategy.setup(model)
    strategy.train()
    return strategy


def second_step(strategy: Strategy, accumulate: int) -> Traffic:
    step(strategy, accumulate)
    for parameter in strategy.module.parameters():
        parameter.grad = None
    with Traffic() as found:
        step(strategy, accumulate)
    return found


def traffic(
    monkeypatch, case: str, ranks: int, rank: int = 0, accumulate: int = 1, name: str = "lenet"
) -> tuple[Traffic, Strategy, int]:
    """Return the traffic of the second step, the strategy, and the elements of the complete model."""
    size = sum(parameter.numel() for parameter in make_model(name, 0).parameters())
    with world(monkeypatch, rank, ranks) as runtime:
        strategy = set_up(case, runtime, name, accumulate)
        return second_step(strategy, accumulate), strategy, size


def padded_size(name: str, shards: int) -> int:
    """Return the elements of a model whose tensors are cut along their first dimension, with padding."""
    sizes = [list(parameter.shape) for parameter in make_model(name, 0).parameters()]
    return sum(-(-rows // shards) * shards * math.prod(rest) for rows, *rest in sizes)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(("algorithm", "calls"), [("flat", 1), ("per_tensor", 8), ("bucketed", 3)])
def test_scratch_sums_every_gradient_once_in_a_step(algorithm, calls, accumulate, monkeypatch):
    """On CPUs one more number is summed: whether a parameter was not used on some rank."""
    case = f"scratch algorithm={algorithm}"
    found, _, size = traffic(monkeypatch, case, 4, accumulate=accumulate)
    assert found.elements == {"all_reduce": size + 1}
    assert found.calls == {"all_reduce": calls + 1}


@pytest.mark.parametrize("accumulate", [1, 4])
def test_ring_sends_a_part_of_the_gradients_in_each_of_2_w_minus_2_rounds(accumulate, monkeypatch):
    found, _, size = traffic(monkeypatch, "scratch algorithm=ring", 8, accumulate=accumulate)
    part = -(-size // 8)
    assert found.calls["send"] == found.calls["receive"] == 2 * 7
    assert found.elements["send"] == found.elements["receive"] == 2 * 7 * part


def ddp_steps(accumulate: int) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Return calls and elements of a step with large and with small buckets. A fake group has no DDP."""
    found = []
    for bucket_cap_mb in (25, 0.01):
        with Runtime("cpu", timeout=30) as runtime:
            runtime.open_group()
            strategy = set_up(f"ddp bucket_cap_mb={bucket_cap_mb}", runtime, "lenet", accumulate)
            counted = second_step(strategy, accumulate)
            found.append((dict(counted.calls), dict(counted.elements)))
            del strategy
    return found


@pytest.mark.parametrize("accumulate", [1, 4])
def test_ddp_sums_every_gradient_once_in_a_step(accumulate):
    size = 129_068  # of LeNet
    for (calls, elements), (small_calls, small_elements) in run_world(2, ddp_steps, accumulate):
        assert (calls, elements) == ({"all_reduce": 1}, {"all_reduce": size})
        assert small_elements == {"all_reduce": size}
        assert small_calls["all_reduce"] > 1


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("case", "gathers"),
    [("fsdp", 2), ("fsdp reshard_after_forward=false", 1), ("mesh shard=null", 2)],
)
def test_fsdp_gathers_in_every_part_and_sums_the_gradients_once(case, gathers, accumulate, monkeypatch):
    """Without accumulation 3 P, which is 1.5 times the traffic of ddp, as each is half of an all_reduce."""
    found, _, _ = traffic(monkeypatch, case, 8, accumulate=accumulate, name="vit")
    size = padded_size("vit", 8)
    assert found.elements == {"all_gather": accumulate * gathers * size, "reduce_scatter": size}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_mesh_of_replicas_sums_every_gradient_once(accumulate, monkeypatch):
    found, _, size = traffic(monkeypatch, "mesh shard=1", 8, accumulate=accumulate, name="vit")
    assert found.elements == {"all_reduce": size}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hsdp_gathers_within_shards_and_sums_shards_over_replicas(accumulate, monkeypatch):
    found, _, _ = traffic(monkeypatch, "mesh shard=2", 8, accumulate=accumulate, name="vit")
    size = padded_size("vit", 2)
    expected = {"all_gather": 2 * accumulate * size, "reduce_scatter": size, "all_reduce": size // 2}
    assert found.elements == expected


@pytest.mark.parametrize(("case", "ranks"), [("pipeline", 2), ("pipeline schedule=gpipe", 2), ("ddp_pipeline", 8)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_pipeline_sends_the_activations_of_a_batch_at_the_cut(case, ranks, accumulate, monkeypatch):
    """LeNet is cut after its first block, where a sample has 20 x 13 x 13 numbers."""
    replicated = case == "ddp_pipeline"
    held = 0
    for rank in (0, ranks - 1):
        found, strategy, size = traffic(monkeypatch, case, ranks, rank, accumulate)
        activations = SAMPLES * 20 * 13 * 13
        assert found.elements["send"] == found.elements["receive"] == activations
        assert found.calls["send"] == accumulate * strategy.num_microbatches
        own = sum(parameter.numel() for parameter in strategy.module.parameters())
        assert found.elements["all_reduce"] == replicated * (own + 1)
        held += own
    assert held == size, "the stages do not make up the model"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_pipelines_of_mesh_gather_once_and_sum_after_every_part(accumulate, monkeypatch):
    """A block's activations are 16 tokens of 16 numbers."""
    found, strategy, _ = traffic(monkeypatch, "mesh pp=2 shard=2", 8, 7, accumulate, "vit")
    names = dict(strategy.module.named_parameters())
    held = sum(-(-each.shape[0] // 2) * 2 * math.prod(each.shape[1:]) for each in names.values())
    assert found.elements == {
        "all_gather": accumulate * held,
        "reduce_scatter": accumulate * held,
        "all_reduce": accumulate * held // 2,
        "send": SAMPLES * 16 * 16,
        "receive": SAMPLES * 16 * 16,
    }


@pytest.mark.parametrize(
    ("axes", "ranks", "groups"),
    [
        ("pp=2 shard=2", 8, {0: [0, 1, 2, 3], 7: [4, 5, 6, 7]}),
        ("pp=2 shard=2 tp=2", 16, {0: [0, 2, 4, 6], 11: [9, 11, 13, 15]}),
        ("pp=2 shard=1", 4, {1: [0, 1], 2: [2, 3]}),
        ("shard=2 tp=2", 8, {3: [1, 3, 5, 7]}),
    ],
)
def test_dp_group_has_the_replicas_and_shards_of_the_same_stage(axes, ranks, groups, monkeypatch):
    """Ranks are counted pp first and tp last. Buffers are sent and BatchNorm is computed in this group."""
    for rank, members in groups.items():
        with world(monkeypatch, rank, ranks) as runtime:
            strategy = set_up(f"mesh {axes}", runtime, "vit", 1)
            assert dist.get_process_group_ranks(strategy.dp_group) == members
