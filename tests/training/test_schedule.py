"""Schedules have the learning rates of torch's schedulers."""

from functools import partial

import pytest
import torch
from omegaconf import OmegaConf
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR

from ddp_lab.config.build import build
from ddp_lab.config.errors import ConfigError
from ddp_lab.training.schedule import build_shape, constant, cosine, make_scheduler, multi_step

EPOCHS, STEPS = 6, 5  # steps per epoch


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4, momentum=0.9)


def rates(scheduler: LRScheduler, steps: int, every: int = 1) -> list[float]:
    """Return the learning rate of each step; the scheduler advances every so many steps."""
    seen = []
    for step in range(1, steps + 1):
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        if step % every == 0:
            scheduler.step()
    return seen


@pytest.mark.parametrize("milestones", [[2, 4], [1, 1, 5], [7]])
def test_multi_step_has_the_rates_of_multi_step_lr(milestones):
    shape = partial(multi_step, milestones=milestones, gamma=0.3)
    expected = rates(MultiStepLR(sgd(), milestones, gamma=0.3), EPOCHS * STEPS, every=STEPS)
    assert rates(make_scheduler(sgd(), shape, EPOCHS, STEPS, 0), EPOCHS * STEPS) == pytest.approx(expected, rel=1e-12)


def test_schedules_have_the_expected_learning_rates():
    def seen(shape, warmup_steps):
        scheduler = make_scheduler(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), shape, 2, 4, warmup_steps)
        return rates(scheduler, 8)

    assert seen(constant, 0) == [1.0] * 8
    assert seen(constant, 3) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert seen(cosine, 4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 0.853553, 0.5, 0.146447], abs=1e-6)


def own(name: str, **options):
    return build_shape({"_target_": f"own_schedules.{name}", "_partial_": True, **options}, EPOCHS)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("failing", {}, r"failed for progress=0\.5: KeyError: 0\.5 \(own_schedules.py, line \d+\)\. It must return"),
        (
            "nothing",
            {},
            r"failed for progress=0: TypeError: .*'NoneType'\. It must return a number, the factor of optimizer.lr",
        ),
        ("falling", {"epochs": 0}, r"failed for epoch=0: ZeroDivisionError: .* \(own_schedules.py, line \d+\)"),
    ],
)
def test_own_schedule_that_fails_is_refused(name, options, message):
    assert own("falling", epochs=6)(3) == 0.5
    with pytest.raises(ConfigError, match=rf"scheduler\._target_=own_schedules\.{name}: {message}"):
        own(name, **options)


def test_partial_of_a_config_is_functools_partial():
    """Hydra's own partial looks up its policy at every call, which takes 0.1 ms or more."""
    shape = build(OmegaConf.create({"_target_": "ddp_lab.training.schedule.cosine", "_partial_": True}))
    assert type(shape) is partial
    assert shape(0.5) == pytest.approx(0.5)
