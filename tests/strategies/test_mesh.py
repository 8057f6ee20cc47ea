"""The strategy mesh: its layout, the plans for tensor parallelism, and what each rank holds."""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import make_model

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.models.lenet import lenet
from ddp_lab.models.vit import Block, vit
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.mesh_layout import arrange
from ddp_lab.world.runtime import Runtime

OPTIONS = {"schedule": "1f1b", "num_microbatches": 4, "num_stages": None, "cut": None, "batch_norm": "local"}
AXES = {"dp": None, "shard": 1, "tp": 1, "pp": 1, "sequence_parallel": False}


@contextmanager
def world(monkeypatch, rank: int, size: int) -> Iterator[Runtime]:
    """Be one rank of a world without the other ranks, whose collectives do nothing."""
    for key, value in {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}.items():
        monkeypatch.setenv(key, str(value))
    with Runtime("cpu") as runtime:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        yield runtime


def strategy_of(runtime: Runtime, model: Chain, **changed) -> Mesh:
    strategy = Mesh(runtime, **(AXES | OPTIONS | changed))
    strategy.partition(model, 8)
    return strategy


def refusal(monkeypatch, ranks: int, model: Chain, **changed) -> str:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(ConfigError) as caught:
        strategy_of(Runtime("cpu"), model, **changed)
    return str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "axes", "expected"),
    [
        (8, (None, 1, 2, 2), (2, 2, 1, 2)),
        (8, (None, None, 2, 2), (2, 1, 2, 2)),
        (8, (4, 2, 1, 2), (2, 2, 2, 1)),
        (1, (None, None, 1, 1), (1, 1, 1, 1)),
    ],
)
def test_axes_fill_the_ranks(ranks, axes, expected):
    assert tuple(arrange(ranks, *axes).values()) == expected


@pytest.mark.parametrize(
    ("ranks", "axes", "message"),
    [
        (
            4,
            (None, 1, 3, 1),
            "strategy.tp=3: cannot lay 4 ranks on a mesh of pp x dp x tp, because 4 is not divisible by 3; use",
        ),
        (1, (None, 2, 1, 1), "strategy.shard=2: must divide the 1 rank along dp; use 1, or null"),
        (2, (3, 1, 1, 1), "strategy.dp=3: are 1 x 3 x 1 = 3 ranks, but 2 were started; start 3, or"),
        (8, (None, 1, 3, 2), "divisible by 2 x 3 = 6; use sizes whose product divides 8, or start a multiple of 6 ranks"),
        (8, (None, 3, 2, 1), "strategy.shard=3: must divide the 4 ranks along dp; use 1 or 2 or 4, or null for all of them"),
    ],
)
def test_axes_that_do_not_fit_are_refused(ranks, axes, message):
    with pytest.raises(ConfigError) as caught:
        arrange(ranks, *axes)
    assert message in str(caught.value)


class Misnamed(Block):
    tensor_parallel: ClassVar[dict[str, str]] = Block.tensor_parallel | {"fc3": "row"}


class Misspelled(Block):
    tensor_parallel: ClassVar[dict[str, str]] = Block.tensor_parallel | {"fc2": "rows"}


class Misplaced(Block):
    tensor_parallel: ClassVar[dict[str, str]] = Block.tensor_parallel | {"norm1": "column"}


class Incomplete(Block):
    tensor_parallel: ClassVar[dict[str, str]] = {name: word for name, word in Block.tensor_parallel.items() if name != "norm2"}


class Counting(nn.Identity):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))


def tied() -> Chain:
    model = make_model("vit", 0)
    model.block1.norm1.weight = model.block0.norm1.weight
    return model


def with_block(block: nn.Module) -> Chain:
    model = make_model("vit", 0)
    model.block1 = block
    return model


VIT = {"depth": 2, "width": 24, "heads": 3, "mlp_ratio": 1.0, "patch_size": 7, "drop_path": 0.0}
CLASS_TOKEN = vit(1, 28, 10, **VIT, pool="token")
NARROW = vit(1, 28, 10, **VIT | {"heads": 6, "mlp_ratio": 1.125}, pool="mean")  # 27 units between fc1 and fc2


@pytest.mark.parametrize(
    ("model", "axes", "message"),
    [
        (lenet(1, 28, 10, None), {"tp": 2}, "no block of the model has a plan for tensor parallelism. Give the class of its "),
        (
            CLASS_TOKEN,
            {"tp": 2},
            "strategy.tp=2: the 3 heads of block0.attn.q are not divisible by 2. With 2 ranks use strategy.tp=1",
        ),
        (NARROW, {"tp": 2}, "strategy.tp=2: the 27 units of block0.fc1 are not divisible by 2. With 2 ranks use strategy.tp=1"),
        (CLASS_TOKEN, {"tp": 3, "sequence_parallel": True}, "the 17 tokens before block0, one of them the class token, "),
        (make_model("vit", 0), {"cut": ["head"]}, "are only used if strategy.pp is above 1"),
        (tied(), {}, "block1.norm1.weight is the same parameter as block0.norm1.weight, which torch does not always update if"),
        (
            with_block(Misnamed(16, 4, 32, 0.0, "block1")),
            {"tp": 2},
            "Misnamed.tensor_parallel: block1 has no module fc3; it has norm1, attn, ",
        ),
        (
            with_block(Misspelled(16, 4, 32, 0.0, "block1")),
            {"tp": 2},
            "fc2 must be one of column, heads, row, tokens, gather, got rows",
        ),
        (with_block(Misplaced(16, 4, 32, 0.0, "block1")), {"tp": 2}, "norm1 is column, which must be a Linear, got Norm"),
        (
            with_block(Incomplete(16, 4, 32, 0.0, "block1")),
            {"tp": 2},
            "must name the module of the parameter norm2.weight, as one of column",
        ),
        (with_block(nn.Sequential(Counting())), {"tp": 2}, "does not support models with buffers, got block1.0.count"),
    ],
)
def test_model_that_does_not_fit_the_axes_is_refused(model, axes, message, monkeypatch):
    ranks = axes.get("pp", 1) * axes.get("tp", 1)
    assert message in refusal(monkeypatch, ranks, model, **axes)


@pytest.mark.parametrize(
    ("ranks", "model", "axes", "remedy"),
    [
        (4, CLASS_TOKEN, {"tp": 2}, "With 4 ranks use strategy.tp=1"),  # 3 divides the heads, but not the ranks
        (12, NARROW, {"tp": 4}, "With 12 ranks use strategy.tp=1 or 3"),  # 6 divides the heads, but not the units
        (12, NARROW, {"tp": 2, "pp": 2, "shard": 3}, "With 12 ranks use strategy.tp=1"),  # with 3 there are no 3 shards
        (4, CLASS_TOKEN, {"tp": 2, "dp": 2}, "With 4 ranks use strategy.tp=1 and strategy.dp=null"),
        (
            2,
            vit(1, 28, 10, **VIT | {"heads": 4}, pool="token"),
            {"tp": 2, "sequence_parallel": True},
            "With 2 ranks there is no strategy.tp above 1 that divides heads, units and tokens; use "
            "strategy.sequence_parallel=false",
        ),
        (
            2,
            CLASS_TOKEN,
            {"tp": 2, "sequence_parallel": True},
            "With 2 ranks there is no strategy.tp above 1 that divides heads, units and tokens; use "
            "strategy.tp=1 with strategy.sequence_parallel=false",
        ),
        (2, make_model("vit", 0), {"sequence_parallel": True}, "got strategy.tp=1. With 2 ranks use strategy.tp=2"),
    ],
)
def test_remedies_can_be_launched(ranks, model, axes, remedy, monkeypatch):
    message = refusal(monkeypatch, ranks, model, **axes)
    assert message.endswith(remedy)
    axes = dict(axes)
    for key, value in re.findall(r"(?:use|with|and) strategy\.(dp|sequence_parallel)=(\w+)", remedy):
        axes[key] = json.loads(value)
    for tp in (re.findall(r"use strategy\.tp=([\d or]+\d|\d)", remedy) or [str(axes.get("tp", 1))])[0].split(" or "):
        strategy_of(Runtime("cpu"), model, **(axes | {"tp": int(tp)}))


def held_by(monkeypatch, rank: int, **axes) -> tuple[Mesh, dict[str, torch.Tensor]]:
    """Return rank `rank` of 8 after `setup`, and its parameters."""
    with world(monkeypatch, rank, 8) as runtime:
        model = make_model("vit", 0)
        model.block0.norm1.weight.requires_grad = model.block1.fc2.bias.requires_grad = False
        strategy = strategy_of(runtime, model, **axes)
        strategy.setup(model)
        return strategy, dict(strategy.module.named_parameters())


CUBE = {"pp": 2, "shard": 2, "tp": 2}


def test_ranks_of_one_dp_read_the_same_samples_and_one_of_each_reports(monkeypatch):
    strategies = [held_by(monkeypatch, rank, **CUBE)[0] for rank in range(8)]
    assert [strategy.dp_rank for strategy in strategies] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert {strategy.dp_size for strategy in strategies} == {2}
    assert [strategy.is_metric_rank for strategy in strategies] == [False] * 4 + [True, False, True, False]


def test_ranks_hold_every_parameter_once_and_layers_are_divided_by_the_plan(monkeypatch):
    complete = dict(make_model("vit", 0).named_parameters())
    held = dict.fromkeys(complete, 0.0)
    for rank in range(8):
        _, parameters = held_by(monkeypatch, rank, **CUBE)
        for name, parameter in parameters.items():
            copies = 2 if parameter.placements[1] == Replicate() else 1
            held[name] += parameter.to_local().numel() / copies
            layer = name.split(".")[-2]
            divided = Shard(0) if layer in ("q", "k", "v", "fc1") else Shard(1)
            along_tp = divided if divided == Shard(0) or name.endswith(("proj.weight", "fc2.weight")) else Replicate()
            assert parameter.placements[1] == along_tp, name
            assert parameter.requires_grad == (name not in ("block0.norm1.weight", "block1.fc2.bias"))
    assert held == {name: parameter.numel() for name, parameter in complete.items()}


def test_log_has_a_picture_of_replicas_and_shards(monkeypatch):
    strategy, _ = held_by(monkeypatch, 0, shard=4)
    _, first, *rows = strategy.describe().splitlines()
    assert first == "pp 1 x dp 8 x tp 1: 4 shards in each of 2 replicas"
    expected = [f"dp {i}   replica {i // 4}   shard {i % 4}   rank {i}" for i in range(8)]
    assert rows[0].startswith(f"  pp 0  {expected[0]}  embed .. head: ")
    assert [row.strip() for row in rows[1:]] == expected[1:]


def test_offload_on_the_cpu_is_logged_to_have_no_effect(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "ddp_lab")
    held_by(monkeypatch, 0, pp=2, num_stages=4, schedule="interleaved1f1b", offload=True)
    expected = "strategy.offload=true has no effect: the device is the CPU, whose memory is that of the host"
    assert caplog.messages == [expected]
    caplog.clear()
    held_by(monkeypatch, 0)
    assert not caplog.messages


def test_picture_of_many_ranks_is_short(monkeypatch):
    with world(monkeypatch, 0, 96) as runtime:
        model = make_model("vit", 0)
        strategy = strategy_of(runtime, model, shard=4, pp=2)
        strategy.setup(model)
        lines = strategy.describe().splitlines()
    assert lines[1] == "pp 2 x dp 48 x tp 1: 4 shards in each of 12 replicas"
    assert len(lines) < 24
    assert "        dp 47  replica 11  shard 3   rank 95" in lines
