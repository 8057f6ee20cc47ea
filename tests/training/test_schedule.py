"""Schedules of the user's own. The learning rates of the others are in test_reference.py."""

from functools import partial

import pytest
from omegaconf import OmegaConf

from ddp_lab.config.build import call_target
from ddp_lab.config.errors import ConfigError
from ddp_lab.run.build import build_shape


def user_schedule(name: str, **options):
    return build_shape({"_target_": f"own_schedules.{name}", "_partial_": True, **options}, 6)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "failing",
            {},
            r"failed for progress=0\.5: KeyError: 0\.5 \(own_schedules.py, line \d+\)\. It must "
            "return",
        ),
        (
            "nothing",
            {},
            r"failed for progress=0: TypeError: .*'NoneType'\. It must return a number, the factor "
            "of optimizer.lr",
        ),
        (
            "falling",
            {"epochs": 0},
            r"failed for epoch=0: ZeroDivisionError: .* \(own_schedules.py, line \d+\)",
        ),
    ],
)
def test_own_schedule_that_fails_is_refused(name, options, message):
    assert user_schedule("falling", epochs=6)(3) == 0.5
    with pytest.raises(ConfigError, match=rf"scheduler\._target_=own_schedules\.{name}: {message}"):
        user_schedule(name, **options)


def test_partial_of_a_config_is_functools_partial():
    """Hydra's own partial looks up its policy at every call, which takes 0.1 ms or more."""
    shape = call_target(
        OmegaConf.create({"_target_": "ddp_lab.training.schedule.cosine", "_partial_": True})
    )
    assert type(shape) is partial
    assert shape(0.5) == pytest.approx(0.5)
