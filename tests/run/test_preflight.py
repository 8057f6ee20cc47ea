"""Checks of a config before a run that need neither files nor other machines. The others: tests/test_doctor.py."""

import pytest

from ddp_lab.launch.preflight import check_averages


@pytest.mark.parametrize(
    ("ema", "strategy", "device", "level"),
    [(0.9, "fsdp", "cuda", "warning"), (None, "fsdp", "cuda", "ok"), (0.9, "fsdp", "cpu", "ok"), (0.9, "ddp", "cuda", "ok")],
)
def test_averages_under_fsdp_on_gpus_are_a_warning(ema, strategy, device, level):
    found = check_averages(ema, strategy, device)
    assert found.level == level
    assert found.text.startswith(f"ema={ema}")
