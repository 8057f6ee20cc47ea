"""Parameter groups that a loop adds to the optimizer: scheduled, and trained as on one device."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STRATEGIES = {
    "ddp": {},
    "scratch": {},
    "fsdp": {},
    "tp": {},
    "pipeline": {"num_microbatches": 2},
    "mesh": {"shard": None},
}
STEPS = 6
ADDED = 2  # steps, after which the group is added
ADDED_RATE = 0.03


def factor(step: int) -> float:
    return 1 / (1 + step)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.rand(8 * STEPS, 6, generator=generator, dtype=torch.float64)
    targets = torch.rand(8 * STEPS, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, targets)


def train(strategy: str, is_new: bool = False, **options) -> list[list[float]]:
    """Return the losses, and the learning rates of both groups after the group was added.

    Args:
        is_new: whether the parameter of the group is none of the model's.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Lab(strategy, device="cpu", timeout=20, **options) as lab:
            model = Chain((6,), first=nn.Linear(6, 8), last=nn.Linear(8, 4))
            model.get_parameter("last.weight").requires_grad_(False)
            samples = data()
            trainer = lab.trainer(
                model, tasks.Regression(), SGD, batch_size=8, example=samples[0], schedule=factor
            )
            losses: list[float] = []
            rates: list[float] = []
            for batch in trainer.batches(samples, 0, shuffle=False):
                losses.append(trainer.step(*batch).item())
                groups = trainer.optimizer.param_groups
                if len(groups) > 1:
                    rates += [group["lr"] for group in groups]
                if len(losses) == ADDED:
                    add(trainer, nn.Parameter(torch.ones(2)) if is_new else None)
            return [losses, rates]
    finally:
        torch.set_default_dtype(before)


def add(trainer, new: nn.Parameter | None) -> None:
    """Add the last weight on the rank that has it, or a new parameter."""
    by_name = dict(trainer.strategy.module.named_parameters())
    parameter = by_name.get("last.weight") if new is None else new
    if parameter is not None:
        parameter.requires_grad_(True)
        trainer.optimizer.add_param_group({"params": [parameter], "lr": ADDED_RATE})


def on_two() -> dict:
    results: dict = {}
    for strategy, options in STRATEGIES.items():
        with pytest.raises(ConfigError) as error:
            train(strategy, is_new=True, **options)
        results[strategy, "new"] = str(error.value)
    return results | {name: train(name, **options) for name, options in STRATEGIES.items()}


@once
def two() -> list[dict]:
    return run_world(2, on_two, timeout=100)


@once
def alone() -> list[list[float]]:
    return train("single")


def test_rate_of_an_added_group_follows_the_schedule():
    _, rates = alone()
    steps = range(ADDED + 1, STEPS + 1)
    expected = [rate * factor(step) for step in steps for rate in (0.1, ADDED_RATE)]
    assert rates == pytest.approx(expected)


def test_added_group_is_trained_as_in_a_plain_loop():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Lab(device="cpu"):
            model = Chain((6,), first=nn.Linear(6, 8), last=nn.Linear(8, 4))
    finally:
        torch.set_default_dtype(before)
    weight = model.get_parameter("last.weight").requires_grad_(False)
    optimizer = SGD([each for each in model.parameters() if each.requires_grad])
    losses: list[float] = []
    for inputs, targets in zip(*(tensor.split(8) for tensor in data().tensors), strict=True):
        rates = (0.1, ADDED_RATE)
        for group, rate in zip(optimizer.param_groups, rates, strict=False):
            group["lr"] = rate * factor(len(losses))
        model.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == ADDED:
            optimizer.add_param_group({"params": [weight.requires_grad_(True)]})
    assert alone()[0] == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_added_group_is_trained_as_on_one_device(strategy):
    for rank in two():
        assert rank[strategy][0] == pytest.approx(alone()[0], rel=1e-10)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_added_group_of_a_new_parameter_is_refused_by_name(strategy):
    for number, rank in enumerate(two()):
        assert rank[strategy, "new"].startswith(
            f"optimizer.add_param_group: strategy={strategy} does not hold a parameter of shape "
            f"[2] on rank {number}, "
        )
