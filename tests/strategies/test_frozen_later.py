"""Parameters that a loop freezes or unfreezes between steps: trained as on one device."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import TrainingError
from ddp_lab.models.chain import Chain

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STRATEGIES = {
    "ddp": {},
    "ddp with the key": {"find_unused_parameters": True},
    "scratch": {},
    "scratch bucketed": {"algorithm": "bucketed", "bucket_mb": 1e-5},
    "scratch with the key": {"find_unused_parameters": True},
    "fsdp": {},
    "tp": {},
    "tp replicas": {"tp": 1},
    "pipeline": {"num_microbatches": 2},
    "ddp_pipeline": {"pp": 1, "num_microbatches": 1, "schedule": "gpipe"},
    "mesh": {"shard": None},
}
REFUSING = ("ddp", "scratch bucketed")  # which send gradients during the backward pass
# By the step after which it is made: the parameter, and whether it is trained from then on. An
# epoch has four steps.
CHANGES = {
    "unfreezes": {3: ("middle.weight", True)},
    "unfreezes after an epoch": {4: ("middle.weight", True)},
    "freezes": {3: ("first.weight", False)},
    "alternates": {
        2: ("middle.weight", True),
        3: ("last.bias", False),
        5: ("last.bias", True),
        6: ("middle.weight", False),
    },
}


class Changing(nn.Linear):
    """Freezes or unfreezes a parameter within a forward pass."""

    def __init__(self, name: str, is_trained: bool):
        super().__init__(8, 8)
        self.get_parameter(name).requires_grad_(not is_trained)
        self.name = name
        self.is_trained = is_trained
        self.passes = 0

    def forward(self, inputs):
        self.passes += self.training
        if self.passes == 3:
            self.get_parameter(self.name).requires_grad_(self.is_trained)
        return super().forward(inputs)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.rand(23, 6, generator=generator, dtype=torch.float64)
    targets = torch.rand(23, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, targets)


def linear() -> nn.Module:
    return nn.Linear(8, 8)


def train(strategy: str, case: str, middle=linear, **options) -> list[float]:
    """Return the losses of two epochs, and that of an evaluation."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Lab(strategy, device="cpu", timeout=20, **options) as lab:
            model = Chain((6,), first=nn.Linear(6, 8), middle=middle(), last=nn.Linear(8, 4))
            if case in ("unfreezes", "unfreezes after an epoch", "alternates"):
                model.get_parameter("middle.weight").requires_grad_(False)
            samples = data()
            trainer = lab.trainer(
                model,
                tasks.Regression(),
                lambda _: SGD(model.parameters()),  # those that are frozen yet, too
                batch_size=6,
                accumulate=3 if strategy in ("single", "ddp", "scratch") else 1,
                max_grad_norm=0.5,
                example=samples[0],
            )
            losses: list[float] = []
            for epoch in range(2):
                for batch in trainer.batches(samples, epoch):
                    losses.append(trainer.step(*batch).item())
                    change(trainer.strategy.module, case, len(losses))
            return [*losses, trainer.evaluate(samples)["loss"]]
    finally:
        torch.set_default_dtype(before)


def change(module: nn.Module, case: str, step: int) -> None:
    """Freeze or unfreeze what a case does after a step, on the rank that has it."""
    changed, is_trained = CHANGES.get(case, {}).get(step, ("", True))
    for name, parameter in module.named_parameters():
        if name == changed:
            parameter.requires_grad_(is_trained)


def refusal(strategy: str, name: str, is_trained: bool, **options) -> str:
    with pytest.raises(TrainingError) as error:
        train(strategy, "", partial(Changing, name, is_trained), **options)
    return str(error.value)


def refusals() -> dict:
    results: dict = {}
    for name in REFUSING:
        options = STRATEGIES[name]
        results[name, "frozen"] = refusal(name.split()[0], "bias", is_trained=False, **options)
        results[name, "unfrozen"] = refusal(name.split()[0], "weight", is_trained=True, **options)
    dist.destroy_process_group()  # which a Lab that ends with an exception leaves open
    return results


def losses() -> dict:
    return {
        (name, case): train(name.split()[0], case, **options)
        for name, options in STRATEGIES.items()
        for case in CHANGES
    }


@once
def two(function: Callable[[], dict]) -> list[dict]:
    return run_world(2, function, timeout=200)


@once
def alone(case: str) -> list[float]:
    return train("single", case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_that_the_loop_freezes_are_trained_as_on_one_device(strategy, case):
    for rank in two(losses):
        assert rank[strategy, case] == pytest.approx(alone(case), rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("change", "name"), [("frozen", "bias"), ("unfrozen", "weight")])
@pytest.mark.parametrize("strategy", REFUSING)
def test_forward_pass_that_freezes_is_refused_by_name(strategy, change, name):
    for rank in two(refusals):
        assert rank[strategy, change].startswith(
            f"strategy={strategy.split()[0]}: the parameter middle.{name} was {change} "
            "(requires_grad) in a forward pass"
        )
        assert "use strategy=scratch with strategy.algorithm=flat" in rank[strategy, change]
