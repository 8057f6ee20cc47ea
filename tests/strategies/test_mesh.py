"""The strategy mesh: its layout, the plans for tensor parallelism, and what each rank holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from small_networks import make_model
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset
from worlds import run_world

from ddp_lab import Lab, tasks
from ddp_lab.checkpoints.state import gather_full_state
from ddp_lab.config.errors import ConfigError, TrainingError
from ddp_lab.models.chain import Chain
from ddp_lab.models.lenet import lenet
from ddp_lab.models.vit import Block, vit
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.tp import TP
from ddp_lab.world.runtime import Runtime

OPTIONS = {"schedule": "1f1b", "num_microbatches": 4, "cut": None, "batch_norm": "local"}
AXES = {"shard": 1, "tp": 1, "pp": 1, "sequence_parallel": False}


@contextmanager
def world(monkeypatch, rank: int, size: int) -> Iterator[Runtime]:
    """Be one rank of a world without the other ranks, whose collectives do nothing."""
    for key, value in {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
    }.items():
        monkeypatch.setenv(key, str(value))
    with Runtime("cpu") as runtime:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        yield runtime


def strategy_of(runtime: Runtime, model: Chain, **changed) -> Mesh:
    strategy = Mesh(runtime, **(AXES | OPTIONS | changed))
    strategy.partition(model, 8)
    return strategy


@pytest.mark.parametrize(
    ("ranks", "axes", "expected"),
    [
        (8, {"shard": 1, "tp": 2, "pp": 2}, (2, 2, 1, 2)),
        (8, {"shard": 2, "pp": 2}, (2, 2, 2, 1)),
        (1, {"shard": None}, (1, 1, 1, 1)),
        (
            8,
            {"tp": 3, "pp": 2},
            "strategy.pp=2 strategy.tp=3: cannot lay 8 ranks on a mesh of dp x pp x tp, because 8 "
            "is not ",
        ),
        (
            8,
            {"tp": 16},
            "divisible by 16; use sizes whose product is 1 or 2 or 4 or 8, or start a multiple of "
            "16 ranks",
        ),
        (
            8,
            {"shard": 3, "tp": 2},
            "strategy.shard=3: must divide the 4 ranks along dp; use 1 or 2 or 4, or null for all "
            "of ",
        ),
    ],
)
def test_axes_fill_the_ranks_or_are_refused(ranks, axes, expected, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    if isinstance(expected, tuple):
        assert tuple(Mesh(Runtime("cpu"), **(AXES | OPTIONS | axes)).axes.values()) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            Mesh(Runtime("cpu"), **(AXES | OPTIONS | axes))


def planned(**words: str | None) -> Chain:
    """Return a ViT, the plan of whose last block has these words; None removes a module from it."""
    words = {name: word for name, word in (Block.tensor_parallel | words).items() if word}
    return with_block(
        type("Changed", (Block,), {"tensor_parallel": words})(16, 4, 32, 0.0, "block1")
    )


class Counting(nn.Identity):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))


class Turned(Block):
    """A block of which two layers have one weight, and are divided along different dimensions."""

    def __init__(self):
        super().__init__(16, 4, 32, 0.0, "block1")
        self.attn.proj.weight = self.attn.q.weight


def with_block(block: nn.Module) -> Chain:
    model = make_model("vit", 0)
    model.block1 = block
    return model


VIT = {"depth": 2, "width": 24, "heads": 3, "mlp_ratio": 1.0, "patch_size": 7, "drop_path": 0.0}
CLASS_TOKEN = vit(1, 28, 10, **VIT, pool="token")
# 27 units between fc1 and fc2
NARROW = vit(1, 28, 10, **VIT | {"heads": 6, "mlp_ratio": 1.125}, pool="mean")


@pytest.mark.parametrize(
    ("model", "axes", "message"),
    [
        (
            lenet(1, 28, 10, None),
            {"tp": 2},
            "no block of the model has a plan for tensor parallelism. Give the class of its ",
        ),
        (
            CLASS_TOKEN,
            {"tp": 2},
            "strategy.tp=2: must divide the 3 heads of block0.attn.q; use one of their divisors",
        ),
        (NARROW, {"tp": 2}, "strategy.tp=2: must divide the 27 units of block0.fc1"),
        (
            CLASS_TOKEN,
            {"tp": 3, "sequence_parallel": True},
            "must divide the 17 tokens before block0. Use strategy.sequence",
        ),
        (
            make_model("vit", 0),
            {"sequence_parallel": True},
            "needs ranks along tp that share the tokens; use strategy.tp=2",
        ),
        (make_model("vit", 0), {"cut": ["head"]}, "is only used if strategy.pp is above 1"),
        (
            planned(fc3="row"),
            {"tp": 2},
            "Changed.tensor_parallel: block1 has no module fc3; it has norm1, attn, ",
        ),
        (
            planned(fc2="rows"),
            {"tp": 2},
            "fc2 must be one of column, heads, row, tokens, gather, got rows",
        ),
        (
            planned(norm1="column"),
            {"tp": 2},
            "norm1 must be tokens or gather, because it is no nn.Linear, got column",
        ),
        (
            planned(norm2=None),
            {"tp": 2},
            "must name the module of the parameter norm2.weight, as one of column",
        ),
        (
            with_block(nn.Sequential(Counting())),
            {"tp": 2},
            "does not support models with buffers, got block1.0.count",
        ),
        (
            with_block(Turned()),
            {"tp": 2},
            "strategy.tp=2: block1.attn.proj.weight is the same parameter as block1.attn.q.weight, "
            "which is divided otherwise: block1.attn.q is column, block1.attn.proj is row. Change ",
        ),
    ],
)
def test_model_that_does_not_fit_the_axes_is_refused(model, axes, message, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(axes.get("tp", 1)))
    with pytest.raises(ConfigError) as caught:
        strategy_of(Runtime("cpu"), model, **axes)
    assert message in str(caught.value)


def test_tensor_parallelism_that_would_shard_nothing_is_refused(monkeypatch):
    # which divides neither LeNet's 20 and 50 channels nor its 500 and 10 units
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        ConfigError, match=r"strategy\.tp=3: no layer of the model can be sharded: 3 must divide"
    ):
        TP(Runtime("cpu"), tp=None, batch_norm="local").partition(lenet(1, 28, 10, None), 8)


def held_by(monkeypatch, rank: int, **axes) -> tuple[Mesh, dict[str, torch.Tensor]]:
    """Return rank `rank` of 8 after `setup`, and its parameters."""
    with world(monkeypatch, rank, 8) as runtime:
        model = make_model("vit", 0)
        model.block1.fc2.bias.requires_grad = False
        model.block0.norm1.weight.requires_grad = False
        strategy = strategy_of(runtime, model, **axes)
        strategy.setup(model)
        return strategy, dict(strategy.module.named_parameters())


def test_ranks_hold_every_parameter_once_and_read_the_samples_of_their_dp(monkeypatch):
    """Layers are divided by the plan; ranks of one dp read the same samples, one reports."""
    complete = dict(make_model("vit", 0).named_parameters())
    elements = dict.fromkeys(complete, 0.0)
    layout = []
    for rank in range(8):
        strategy, parameters = held_by(monkeypatch, rank, pp=2, shard=2, tp=2)
        layout.append((strategy.dp_rank, strategy.dp_size, strategy.is_metric_rank))
        for name, parameter in parameters.items():
            copies = 2 if parameter.placements[1] == Replicate() else 1
            elements[name] += parameter.to_local().numel() / copies
            layer = name.split(".")[-2]
            divided = Shard(0) if layer in ("q", "k", "v", "fc1") else Shard(1)
            along_tp = (
                divided
                if divided == Shard(0) or name.endswith(("proj.weight", "fc2.weight"))
                else Replicate()
            )
            assert parameter.placements[1] == along_tp, name
            assert parameter.requires_grad == (
                name not in ("block0.norm1.weight", "block1.fc2.bias")
            )
    assert elements == {name: parameter.numel() for name, parameter in complete.items()}
    assert [dp_rank for dp_rank, _, _ in layout] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert {dp_size for _, dp_size, _ in layout} == {2}
    assert [reports for _, _, reports in layout] == [False] * 4 + [True, False, True, False]


@pytest.mark.parametrize(
    ("axes", "ranks", "has_copies"),
    [
        ({}, 1, False),
        ({"tp": 2}, 2, False),
        ({"tp": 2, "sequence_parallel": True}, 2, False),
        ({"pp": 2, "tp": 2}, 4, False),
        ({"tp": 2}, 4, True),
        ({"pp": 2, "shard": 2}, 4, True),
    ],
)
def test_parameters_are_gathered_into_copies_only_with_replicas(
    axes, ranks, has_copies, monkeypatch
):
    with world(monkeypatch, 0, ranks) as runtime:
        model = make_model("vit", 0)
        strategy = strategy_of(runtime, model, **axes)
        strategy.setup(model)
        blocks = strategy.module.children()
        assert {isinstance(block, FSDPModule) for block in blocks} == {has_copies}
        assert strategy.copies_weights == has_copies


class Branch(nn.Module):
    """A block of which the samples choose parts: a rank may use one that another rank does not."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.always = nn.Linear(4, 4)
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, inputs):
        chosen = (inputs[:, 0] > 0.5).long()
        hidden = inputs if self.kind == "adapter" else torch.tanh(self.always(inputs))
        # the last one is never used
        used = self.parts[1:2] if self.kind == "adapter" else self.parts[:2]
        for number, part in enumerate(used, start=int(self.kind == "adapter")):
            rows = chosen == number
            if rows.any():
                hidden = torch.where(rows[:, None], part(hidden), hidden)
        return hidden


class Stop(nn.Module):
    """A block at which the backward pass ends on rank 0."""

    def __init__(self, rank: int):
        super().__init__()
        self.rank = rank
        self.inner = nn.Linear(4, 4)

    def forward(self, inputs):
        return self.inner(inputs.detach() if self.rank == 0 else inputs)


MESHES: list[tuple[int, dict, int]] = [
    (2, {}, 1),
    (2, {"shard": None}, 2),
    (4, {"pp": 2, "num_microbatches": 2}, 1),
]


def train_branches(
    strategy: str, options: dict, accumulate: int
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights by kind.

    The last batch has one sample, so that one of two ranks has padding alone.
    """
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(33, 4, generator=generator)
    inputs[:, 0] = torch.arange(33) % 2
    inputs[-1, 0] = 1  # padding is zeros, which choose another part
    data = TensorDataset(inputs, torch.rand(33, 2, generator=generator))
    make = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    states = dict[str, dict[str, torch.Tensor]]()
    with Lab(strategy, device="cpu", timeout=20, **options) as lab:
        for kind in ("branch", "adapter"):
            torch.manual_seed(0)
            after = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 2)
            model = nn.Sequential(Branch(kind), *after)
            trainer = lab.trainer(model, tasks.Regression(), make, 8, accumulate, example=inputs[0])
            for batch in trainer.batches(data, 0, shuffle=False):
                trainer.step(*batch)
            states[kind], _ = gather_full_state(trainer.strategy, trainer.state.weights())
    return states


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "options", "accumulate"), MESHES)
def test_parameters_that_only_some_ranks_use_equal_single(ranks, options, accumulate):
    expected = run_world(1, train_branches, "single", {}, 1)[0]
    states = run_world(ranks, train_branches, "mesh", options, accumulate, timeout=90)[0]
    for kind, weights in expected.items():
        for name, tensor in weights.items():
            assert (states[kind][name] - tensor).abs().max() < 1e-12, (kind, name)


def stopped() -> str:
    with Lab("mesh", device="cpu", timeout=8) as lab:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Stop(lab.rank), nn.Linear(4, 2))
        make = partial(torch.optim.SGD, lr=0.1)
        trainer = lab.trainer(model, tasks.Regression(), make, batch_size=4, example=torch.zeros(4))
        try:
            trainer.step(torch.rand(2, 4), torch.rand(2, 2))
        except TrainingError as error:
            return str(error)
        except RuntimeError:  # of gloo: this rank waits for another one, which has ended
            return ""
        return "trained"


def test_blocks_that_only_some_ranks_reach_in_the_backward_pass_are_refused_by_name():
    outcomes = run_world(2, stopped, timeout=60)
    message = next(filter(None, outcomes))
    assert "trained" not in outcomes
    assert message.startswith("strategy=mesh: rank "), message
    assert "must sum the gradients of the blocks in the same order" in message
    assert "Use another strategy, for example ddp" in message


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"pp": 2, "tp": 2},
            "strategy.pp=2 strategy.tp=2: Linear is no Chain of blocks, so strategy.pp=2 cuts it "
            "by a trace, whose stages have no layers that could be divided or sharded. Use ",
        ),
        (
            {"pp": 2, "shard": None},
            "strategy.pp=2 strategy.shard=2: Linear is no Chain of blocks, so strategy.pp=2 cuts "
            "it by a trace",
        ),
        (
            {"pp": 4, "sequence_parallel": True},
            "strategy.pp=4 strategy.sequence_parallel=true: Linear is no Chain of blocks",
        ),
        ({"pp": 4}, "strategy=mesh: cuts the model by a trace, and needs a sample for it: "),
        (
            {"pp": 4, "batch_norm": "sync"},
            "strategy.batch_norm=sync: is not supported by strategy=mesh for a model that is no ",
        ),
        (
            {"tp": 2},
            "strategy.tp=2: Linear is no Chain of blocks with a plan for tensor parallelism, and "
            "has no plan of its own. Name the layers to divide, for example strategy.plan={",
        ),
        (
            {"cut": ["0"]},
            "strategy.cut=['0']: is not supported by a mesh for Linear, which is no Chain of "
            "blocks. Use strategy.cut=null",
        ),
        (
            {"sequence_parallel": True},
            "strategy.sequence_parallel=True: is not supported by a mesh for Linear, which is no "
            "Chain of blocks. Use strategy.sequence_parallel=false",
        ),
    ],
)
def test_axes_that_a_model_that_has_no_blocks_does_not_support_are_refused(
    axes, message, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    strategy = Mesh(Runtime("cpu"), **(AXES | OPTIONS | axes))
    with pytest.raises(ConfigError) as caught:
        strategy.partition(nn.Linear(2, 2), 8)
    assert str(caught.value).startswith(message)


def test_model_that_has_no_blocks_trains_on_a_mesh_of_one_rank():
    with Lab("mesh", device="cpu") as lab:
        optimizer = partial(torch.optim.SGD, lr=0.1)
        model = nn.Linear(2, 2)
        start = model.weight.detach().clone()
        sample = torch.ones(2), torch.ones(2)
        trainer = lab.trainer(model, tasks.Regression(), optimizer, batch_size=4, example=sample)
        trainer.step(torch.ones(4, 2), torch.ones(4, 2))
        weight = trainer.strategy.module.state_dict()["weight"]
        assert not torch.equal(weight.full_tensor(), start)
