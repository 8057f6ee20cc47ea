"""Optimizers of users on shards and stages: equal to one device, or refused before a step."""

from functools import partial

import pytest
import torch
from slow_rows import slow_but
from torch import nn
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain

SHARDING = {"fsdp": {}, "tp": {"tp": None}, "mesh": {"shard": None}}
STAGES = {"pipeline": {"num_microbatches": 1, "schedule": "gpipe"}}
OTHERS = {"ddp": {}, "scratch": {}}
FAST = ("fsdp", "pipeline", "ddp")  # of each of these; the others are slow


class PerTensor(torch.optim.Optimizer):
    """Scales the step of each parameter by norms, as LARS does."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * self.ratio(parameter))

    def ratio(self, parameter):
        """Return the factor of the step."""
        return 1.0


class LarsItem(PerTensor):
    def ratio(self, parameter):
        return parameter.norm().item() / (parameter.grad.norm().item() + 0.1)


class LarsFloat(PerTensor):
    def ratio(self, parameter):
        size = torch.linalg.vector_norm(parameter)
        of_gradient = parameter.grad.abs().sum()
        return float(size) / float(of_gradient + 0.1) if size > 0 and of_gradient else 1.0


class LarsTensor(PerTensor):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(
                    group["lr"] * parameter.norm() / (parameter.grad.norm() + 0.1) * parameter.grad
                )


class OfLocal(PerTensor):
    """Asks for the local tensors, of which it computes norms."""

    def ratio(self, parameter):
        return float(local_of(parameter).norm() / (local_of(parameter.grad).norm() + 0.1))


def local_of(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class OfAll(PerTensor):
    """Scales all steps by one number, as Prodigy does."""

    @torch.no_grad()
    def step(self, closure=None):
        self.size = sum(
            parameter.norm().item() for group in self.param_groups for parameter in group["params"]
        )
        super().step()

    def ratio(self, parameter):
        return 1 / self.size


class Lion(PerTensor):
    """Updates each element by itself."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.1)
                parameter.add_(torch.sign(momentum), alpha=-group["lr"])


class Unsupported(PerTensor):
    def ratio(self, parameter):
        return parameter.data.numpy().sum()


def with_hook(parameters):
    """Return SGD with a hook that clips each gradient by its norm."""
    optimizer = torch.optim.SGD(parameters, lr=0.5)

    def clip(optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.1 / max(0.1, parameter.grad.norm().item()))

    optimizer.register_step_pre_hook(clip)
    return optimizer


SAME = {
    "item": LarsItem,
    "float and bool": LarsFloat,
    "tensor": LarsTensor,
    "elementwise": Lion,
    "RMSprop": partial(torch.optim.RMSprop, lr=0.02),
    "hook": with_hook,
}
LOCAL = {"local": OfLocal, "numpy": Unsupported}
ALL = {"all": OfAll}


def train(strategy: str, make, **options) -> list[float]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Lab(strategy, device="cpu", timeout=20, **options) as lab:
            generator = torch.Generator().manual_seed(2)
            samples = TensorDataset(*torch.rand(2, 16, 4, generator=generator))
            model = Chain((4,), first=nn.Linear(4, 6), second=nn.Tanh(), last=nn.Linear(6, 4))
            trainer = lab.trainer(model, tasks.Regression(), make, batch_size=4, example=samples[0])
            return [
                trainer.step(*batch).item()
                for epoch in range(2)
                for batch in trainer.batches(samples, epoch)
            ]
    finally:
        torch.set_default_dtype(before)


def outcome(strategy: str, make, **options) -> list[float] | str:
    try:
        return train(strategy, make, **options)
    except ConfigError as error:
        return str(error)


def on_two(strategies: tuple[str, ...], names: tuple[str, ...]) -> dict:
    every = SHARDING | STAGES | OTHERS
    return {
        (strategy, name): outcome(strategy, (SAME | LOCAL | ALL)[name], **every[strategy])
        for strategy in strategies
        for name in names
    }


@once
def world(strategies: tuple[str, ...], names: tuple[str, ...]) -> list[dict]:
    return run_world(2, on_two, strategies, names, timeout=200)


def two(strategy: str, names: tuple[str, ...] = (*LOCAL, *ALL)) -> list[dict]:
    """Return what each rank has found, of the strategies that are as fast as this one."""
    every = (*SHARDING, *STAGES, *OTHERS)
    alike = tuple(each for each in every if (each in FAST) == (strategy in FAST))
    return world(alike, names)


@once
def alone(name: str) -> list[float]:
    return train("single", (SAME | LOCAL | ALL)[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("strategy", [*SHARDING, *STAGES, *OTHERS])
def test_optimizer_computes_the_same_under_every_strategy(strategy, name):
    for rank in two(strategy, tuple(SAME)):
        assert rank[strategy, name] == pytest.approx(alone(name), rel=1e-10)


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("strategy", slow_but(["fsdp"], SHARDING))
def test_optimizer_that_depends_on_the_shards_is_refused(strategy, name):
    for rank in two(strategy):
        message = rank[strategy, name]
        assert isinstance(message, str), message
        assert message.startswith(f"optimizer: strategy={strategy} shards the parameters")
        assert message.endswith("Use another optimizer, such as torch.optim.AdamW, or strategy=ddp")
        assert ("OfLocal computes something else" in message) == (name == "local")


@pytest.mark.parametrize("name", [*LOCAL, *ALL])
@pytest.mark.parametrize("strategy", slow_but(["ddp"], OTHERS))
def test_any_optimizer_is_allowed_where_nothing_is_divided(strategy, name):
    for rank in two(strategy):
        assert rank[strategy, name] == pytest.approx(alone(name), rel=1e-10)


@pytest.mark.parametrize("strategy", slow_but(["fsdp"], SHARDING))
def test_number_over_all_parameters_is_that_of_one_device(strategy):
    for rank in two(strategy):
        assert rank[strategy, "all"] == pytest.approx(alone("all"), rel=1e-10)


def test_number_over_all_parameters_is_refused_where_ranks_have_different_ones():
    for rank in two("pipeline"):
        assert rank["pipeline", "all"].startswith(
            "optimizer: strategy=pipeline divides the parameters between ranks, and OfAll"
        )


def optimizers_made() -> int:
    made: list[torch.optim.Optimizer] = []

    def make(parameters):
        made.append(Lion(parameters))
        return made[-1]

    train("fsdp", make)
    return len(made)


def test_check_leaves_no_trace():
    assert run_world(1, optimizers_made) == [1]
