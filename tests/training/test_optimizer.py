"""Optimizers' steps on the shards of DTensors."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launches import refusal_in_world
from torch import optim
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from worlds import run_world

from ddp_lab.advise.advisor import Advisor
from ddp_lab.advise.devices import find_devices
from ddp_lab.advise.plan import CannotPlan
from ddp_lab.config.errors import ConfigError
from ddp_lab.training.optimizer import require_support, step_of
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
REST = "~optimizer.momentum ~optimizer.nesterov data=synthetic data.dataset.image_size=28 batch_size=8"
ADAFACTOR = f"optimizer._target_=torch.optim.Adafactor {REST}"
RPROP = f"optimizer._target_=torch.optim.Rprop ~optimizer.weight_decay {REST}"
DTENSORS = {"fsdp": "fsdp", "mesh strategy.shard=2": "mesh", "mesh strategy.pp=2": "mesh", "tp strategy.tp=2": "tp"}


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
        assert set(map(frozenset, kept)) == {frozenset(STATES[kind.removeprefix("fused ")])}


def test_other_optimizers_keep_their_own_step():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.to_local = lambda: parameter  # as a DTensor has it
    for make in (torch.optim.RMSprop, type("Own", (torch.optim.SGD,), {})):
        optimizer = make([parameter], lr=0.1)
        assert step_of(optimizer) == optimizer.step


@pytest.mark.parametrize("strategy", DTENSORS)
def test_optimizer_that_does_not_support_shards_is_refused_before_the_group_opens(strategy):
    codes, texts = zip(*run_world(2, refusal_in_world, f"strategy={strategy} {ADAFACTOR} device=cpu"), strict=True)
    assert codes == (2, 2)
    assert "".join(texts) == (
        "error: optimizer._target_=torch.optim.Adafactor: cannot update DTensors, as "
        f"strategy={DTENSORS[strategy]} has them: torch's Adafactor.step does not support them. Use another optimizer, for "
        "example torch.optim.AdamW, or a strategy without DTensors, for example ddp\n"
    )


def test_advise_refuses_an_optimizer_that_does_not_support_shards():
    for optimizer in (ADAFACTOR, RPROP):
        advisor = Advisor.of(optimizer.split(), None, find_devices("2xH100"))
        for strategy in ("fsdp", "tp"):
            with pytest.raises(ConfigError, match="cannot update DTensors"):
                advisor.plan([f"strategy={strategy}"])


def test_optimizer_with_a_step_of_its_own_and_replicated_blocks_are_not_refused():
    class Own(torch.optim.Adafactor):
        def step(self, closure=None):
            pass

    strategy = SimpleNamespace(name="fsdp", has_dtensors=True)
    require_support(Own([torch.nn.Parameter(torch.ones(1))]), strategy, "")
    blocks = "{conv1:replicate,conv2:replicate,fc1:replicate,fc2:replicate}"
    advisor = Advisor.of([*ADAFACTOR.split(), "strategy=tp", f"strategy.plan={blocks}"], None, find_devices("2xH100"))
    with pytest.raises(CannotPlan, match="without values failed"):  # it is not refused, but Adafactor's step reads values
        advisor.plan(advisor.own)
