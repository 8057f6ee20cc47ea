"""Optimizers' steps on the shards of DTensors."""

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
} | {make.__name__.lower(): make for make in (optim.Adadelta, optim.Adagrad, optim.Adamax, optim.NAdam, optim.RAdam)}
STATES = {  # the tensors of the optimizer's state that have the shape of a parameter
    "sgd": {"momentum_buffer"},
    "adamw": {"exp_avg", "exp_avg_sq"},
    "rmsprop": {"square_avg", "momentum_buffer", "grad_avg"},
    "asgd": {"ax"},
    "adadelta": {"square_avg", "acc_delta"},
    "adagrad": {"sum"},
    "adamax": {"exp_avg", "exp_inf"},
    "nadam": {"exp_avg", "exp_avg_sq"},
    "radam": {"exp_avg", "exp_avg_sq"},
}


def train() -> dict[str, list[tuple[torch.Tensor, torch.Tensor, set[str]]]]:
    """Return for each optimizer and weight: a whole tensor and its shards after three steps, and the DTensors of the state."""
    with Runtime("cpu") as runtime:
        runtime.open_group()
        mesh = runtime.mesh({"dp": dist.get_world_size()})
        return {kind: [train_one(make, shape, mesh) for shape in ((5, 3), (1, 2), (4,))] for kind, make in OPTIMIZERS.items()}


def train_one(make, shape: tuple[int, ...], mesh) -> tuple[torch.Tensor, torch.Tensor, set[str]]:
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(shape))
    shard = torch.nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
    plain, sharded = make([whole]), make([shard])
    for _ in range(3):
        whole.grad = torch.randn_like(whole)
        shard.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
        plain.step()
        step_of(sharded)()
        assert sharded.param_groups[0]["params"] == [shard]
    kept = {key: value for key, value in sharded.state[shard].items() if isinstance(value, DTensor)}
    assert all(value.shape == shard.shape for value in kept.values())
    return whole.detach(), shard.detach().full_tensor(), set(kept)


def test_steps_on_shards_equal_those_of_whole_tensors():
    """The shards differ in size, and some are empty."""
    for found in run_world(2, train):
        for kind, weights in found.items():
            for whole, shards, kept in weights:
                assert (shards - whole).abs().max() <= 1e-7, kind
                assert kept == STATES[kind.removeprefix("fused ")], kind


def test_other_optimizers_keep_their_own_step():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.to_local = lambda: parameter  # as a DTensor has it
    for make in (torch.optim.RMSprop, type("Own", (torch.optim.SGD,), {})):
        optimizer = make([parameter], lr=0.1)
        assert step_of(optimizer) == optimizer.step
