"""Optimizers' steps on the shards of DTensors."""

from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import optim
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from worlds import run_world

from ddp_lab.training.optimizer import step_of
from ddp_lab.world.runtime import Runtime

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
} | {
    make.__name__.lower(): make
    for make in (optim.Adadelta, optim.Adagrad, optim.Adamax, optim.NAdam, optim.RAdam)
}


def train() -> dict[
    str, list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]]
]:
    """Return for each optimizer and weight: it and its state after three steps, and its shards'."""
    with Runtime("cpu") as runtime:
        runtime.open_group()
        mesh = runtime.mesh({"dp": dist.get_world_size()})
        return {
            kind: [train_one(make, shape, mesh) for shape in ((5, 3), (1, 2), (4,))]
            for kind, make in OPTIMIZERS.items()
        }


def train_one(make, shape: tuple[int, ...], mesh):
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(shape))
    shard = torch.nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
    plain = make([whole])
    sharded = make([shard])
    for _ in range(3):
        whole.grad = torch.randn_like(whole)
        shard.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
        plain.step()
        step_of(sharded)()
        assert sharded.param_groups[0]["params"] == [shard]
    sums = {
        key: value.full_tensor()
        for key, value in sharded.state[shard].items()
        if isinstance(value, DTensor)
    }
    return whole.detach(), plain.state[whole], shard.detach().full_tensor(), sums


def test_steps_on_shards_equal_those_of_whole_tensors():
    """The shards differ in size, and some are empty."""
    for by_kind in run_world(2, train):
        for kind, weights in by_kind.items():
            for whole, state, shards, sums in weights:
                assert (shards - whole).abs().max() <= 1e-7, kind
                assert sums.keys() == {
                    key
                    for key, value in state.items()
                    if value is not None and value.shape == whole.shape
                }
                assert all(
                    torch.allclose(value, state[key], rtol=0, atol=1e-7)
                    for key, value in sums.items()
                ), kind


def test_other_optimizers_keep_their_own_step():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.to_local = lambda: parameter  # as a DTensor has it
    parameter.grad = torch.ones(2)
    for make in (torch.optim.RMSprop, type("Own", (torch.optim.SGD,), {})):
        before = parameter.detach().clone()
        optimizer = make([parameter], lr=0.1)
        with patch("ddp_lab.training.optimizer.on_shards") as on_shards:
            step_of(optimizer)()
        assert not on_shards.called
        assert (parameter < before).all()
