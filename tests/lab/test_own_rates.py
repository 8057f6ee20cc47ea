"""A loop of one's own that sets learning rates, draws numbers, adds groups and writes checkpoints.

It does as in a plain loop of torch, and resumes as if it had not been interrupted; or one message
says what is not possible.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LinearLR
from torch.utils.data import TensorDataset

from ddp_lab import Lab
from ddp_lab.config.errors import ConfigError

RATE = 0.1
SGD = partial(torch.optim.SGD, lr=RATE, momentum=0.9)
SAMPLES = 24
BATCH = 8
STEPS = SAMPLES // BATCH  # of an epoch


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.rand(SAMPLES, 6, generator=generator)
    return TensorDataset(inputs, torch.rand(SAMPLES, 4, generator=generator))


def loss(outputs, targets):
    return (outputs - targets).square().mean(1)


def trainer_of(lab: Lab, **arguments: Any):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return lab.trainer(model, loss, SGD, batch_size=BATCH, example=data()[0], **arguments)


def double(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return what doubles the rate, as in a search for the largest one."""

    def change() -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 2

    return change


def decay(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return ExponentialLR(optimizer, 0.5).step


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("rule", [double, decay])
def test_rates_that_the_loop_sets_are_those_of_the_steps(rule):
    samples = data()
    with Lab(device="cpu") as lab:
        trainer = trainer_of(lab)
        module = trainer.strategy.module
        plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        plain.load_state_dict(module.state_dict())
        optimizer = SGD(plain.parameters())
        change = rule(trainer.optimizer)
        change_plain = rule(optimizer)
        rates = []
        for inputs, targets in trainer.batches(samples, 0):
            trainer.step(inputs, targets)
            optimizer.zero_grad()
            F.mse_loss(plain(inputs), targets).backward()
            optimizer.step()
            change()
            change_plain()
            rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == [RATE * (2 if rule is double else 0.5) ** (step + 1) for step in range(STEPS)]
    for mine, other in zip(weights(module), weights(plain), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_rates_of_a_schedule_and_of_the_loop_are_refused_together():
    with Lab(device="cpu") as lab:
        trainer = trainer_of(lab, schedule=lambda step: 0.5)
        batches = trainer.batches(data(), 0)
        trainer.step(*next(batches))
        trainer.optimizer.param_groups[0]["lr"] = 0.3
        message = (
            "schedule: sets the learning rate of this step to 0.05, but the loop has set it to"
        )
        with pytest.raises(ConfigError, match=message):
            trainer.step(*next(batches))


def test_schedule_may_follow_what_the_loop_decides():
    """Its function gives another value later: that of the step counts which has begun."""
    factors = [1.0]
    with Lab(device="cpu") as lab:
        trainer = trainer_of(lab, schedule=lambda step: factors[-1])
        rates = []
        for batch in trainer.batches(data(), 0):
            factors.append(factors[-1] / 2)
            trainer.step(*batch)
            rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == [RATE / 2, RATE / 4, RATE / 8]


def test_warm_up_of_an_added_group_by_a_scheduler_of_torch_counts_from_its_first_step():
    with Lab(device="cpu") as lab:
        trainer = trainer_of(lab)
        module = trainer.strategy.module
        frozen = module[0]
        frozen.requires_grad_(False)
        batches = trainer.batches(data(), 0)
        trainer.step(*next(batches))
        frozen.requires_grad_(True)
        extra = nn.Parameter(torch.zeros(1))
        trainer.optimizer.add_param_group({"params": [extra], "lr": 0.01})
        LinearLR(trainer.optimizer, start_factor=0.1, total_iters=5)
        trainer.step(*next(batches))
        assert [group["lr"] for group in trainer.optimizer.param_groups] == [RATE * 0.1, 0.001]


def interrupted(
    tmp_path: Path, cut: int, loop: Callable[[Any, torch.Tensor], torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the weights after two epochs: of one launch, and of one that ends after some steps.

    Args:
        cut: number of steps of the first launch.
        loop: changes the inputs, or the trainer, before each step.
    """
    results = []
    for name, ends in {"straight": [2 * STEPS], "cut": [cut, 2 * STEPS]}.items():
        for end in ends:
            with Lab(device="cpu", seed=3) as lab:
                trainer = trainer_of(lab)
                trainer.resume(tmp_path / name)
                while trainer.progress.step < end:
                    for inputs, targets in trainer.batches(data(), trainer.progress.epoch):
                        trainer.step(loop(trainer, inputs), targets)
                        if trainer.progress.step == end:
                            break
                trainer.checkpoint(tmp_path / name)
                last = weights(trainer.strategy.module)
        results.append(last)
    return results[0], results[1]


def with_noise(trainer: Any, inputs: torch.Tensor) -> torch.Tensor:
    return inputs + torch.randn_like(inputs)


def with_lower_rate(trainer: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Lower the rate by a factor, from what it is, as schedulers of torch do."""
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.8
    return inputs


@pytest.mark.parametrize("loop", [with_noise, with_lower_rate])
@pytest.mark.parametrize("cut", [STEPS - 1, STEPS])
def test_loop_resumes_with_its_random_numbers_and_its_rates(loop, cut, tmp_path):
    straight, resumed = interrupted(tmp_path, cut, loop)
    assert all(map(torch.equal, straight, resumed))


def test_rates_of_a_loop_do_not_count_after_a_launch_with_a_schedule(tmp_path):
    for schedule, expected in ((None, 0.7), (lambda step: 0.5, RATE / 2), (None, RATE)):
        with Lab(device="cpu") as lab:
            trainer = trainer_of(lab, schedule=schedule)
            trainer.resume(tmp_path)
            if trainer.progress.step == 0:
                trainer.optimizer.param_groups[0]["lr"] = 0.7
            trainer.step(*next(trainer.batches(data(), 0)))
            trainer.checkpoint(tmp_path)
            assert trainer.optimizer.param_groups[0]["lr"] == expected


def test_rate_of_a_launch_counts_where_the_loop_has_set_none(tmp_path):
    for rate in (RATE, RATE / 4):
        with Lab(device="cpu") as lab:
            model = nn.Linear(6, 4)
            make = partial(torch.optim.SGD, lr=rate)
            trainer = lab.trainer(model, loss, make, batch_size=BATCH)
            trainer.resume(tmp_path)
            trainer.step(*next(trainer.batches(data(), 0)))
            trainer.checkpoint(tmp_path)
            assert trainer.optimizer.param_groups[0]["lr"] == rate


def test_checkpoint_with_an_added_group_resumes(tmp_path):
    rates = []
    for launch in range(2):
        with Lab(device="cpu", seed=3) as lab:
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
            model[0].requires_grad_(False)
            trainer = lab.trainer(model, loss, SGD, batch_size=BATCH)
            if launch:
                model[0].requires_grad_(True)
                trainer.optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
                trainer.resume(tmp_path)
                assert trainer.progress.step == STEPS
                rates = [group["lr"] for group in trainer.optimizer.param_groups]
            for place, batch in enumerate(trainer.batches(data(), launch)):
                trainer.step(*batch)
                if place == 0 and not launch:
                    model[0].requires_grad_(True)
                    group = {"params": model[0].parameters(), "lr": 0.01}
                    trainer.optimizer.add_param_group(group)
            trainer.checkpoint(tmp_path)
    assert rates == [RATE, 0.01]


def test_trainers_of_a_lab_do_not_write_into_one_folder(tmp_path):
    with Lab(device="cpu") as lab:
        first = trainer_of(lab)
        second = trainer_of(lab)
        first.checkpoint(tmp_path / "both")
        with pytest.raises(ConfigError, match="both has the checkpoints of another trainer of"):
            second.checkpoint(tmp_path / "both")
        second.checkpoint(tmp_path / "second")
        # one that continues them may write there, until the first one does
        second.resume(tmp_path / "both")
        first.checkpoint(tmp_path / "both")
        second.checkpoint(tmp_path / "both")
        with pytest.raises(ConfigError, match="both has the checkpoints of another trainer of"):
            first.checkpoint(tmp_path / "both")


@pytest.mark.parametrize("name", ["optimizer", "scheduler", "strategy", "ema"])
def test_parts_of_a_trainer_cannot_be_replaced(name):
    with Lab(device="cpu") as lab:
        trainer = trainer_of(lab)
        with pytest.raises(ConfigError, match=f"trainer.{name}: cannot be replaced, because the"):
            setattr(trainer, name, None)
