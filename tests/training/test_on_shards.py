"""Optimizers' steps on the shards of DTensors."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from worlds import run_world

from ddp_lab.training.on_shards import step_of
from ddp_lab.world.runtime import Runtime

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def train(kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor], set[tuple[str, ...]]]:
    """Return the weights after three steps on shards and of whole tensors, and the keys of the state that are DTensors."""
    with Runtime("cpu") as runtime:
        runtime.open_group()
        mesh = runtime.mesh({"dp": dist.get_world_size()})
        torch.manual_seed(0)
        wholes = [
            torch.nn.Parameter(torch.randn(5, 3)),
            torch.nn.Parameter(torch.randn(1, 2)),
            torch.nn.Parameter(torch.ones(4)),
        ]
        shards = [torch.nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)])) for whole in wholes]
        steps = [(OPTIMIZERS[kind]([whole]), OPTIMIZERS[kind]([shard])) for whole, shard in zip(wholes, shards, strict=True)]
        for _ in range(3):
            for whole, shard, (plain, sharded) in zip(wholes, shards, steps, strict=True):
                whole.grad = torch.randn_like(whole)
                shard.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
                plain.step()
                step_of(sharded)()
                assert sharded.param_groups[0]["params"] == [shard]
        states = [(shard, sharded.state[shard]) for shard, (_, sharded) in zip(shards, steps, strict=True)]
        kept = {tuple(key for key, value in state.items() if isinstance(value, DTensor)) for _, state in states}
        assert all(
            value.shape == shard.shape for shard, state in states for value in state.values() if isinstance(value, DTensor)
        )
        return [whole.detach() for whole in wholes], [shard.detach().full_tensor() for shard in shards], kept


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_step_on_shards_equals_that_of_whole_tensors(kind):
    """The shards differ in size, and some are empty."""
    for wholes, shards, kept in run_world(2, train, kind):
        for whole, shard in zip(wholes, shards, strict=True):
            torch.testing.assert_close(shard, whole, rtol=0, atol=1e-7)
        assert kept == {("momentum_buffer",) if "sgd" in kind else ("exp_avg", "exp_avg_sq")}


def test_other_optimizers_keep_their_own_step():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.to_local = lambda: parameter  # as a DTensor has it
    for make in (torch.optim.RMSprop, type("Own", (torch.optim.SGD,), {})):
        optimizer = make([parameter], lr=0.1)
        assert step_of(optimizer) == optimizer.step
