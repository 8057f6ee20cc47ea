"""Short training runs with precision=fp16, on the CPU too, where torch's autocast has float16."""

import itertools
from unittest.mock import patch

import torch
from case import Case
from training import Outcome, run_case

from ddp_lab.strategies import loss_scale
from ddp_lab.strategies.base import Strategy
from ddp_lab.world.runtime import Runtime

FITTING = 2.0**10  # no step is skipped
LARGE = 2.0**21  # some of the six steps of LeNet and the vit are skipped, until the scale fits
on_cpu = patch.object(Strategy, "fp16_devices", frozenset({"cpu", "cuda"}))


def in_fp16(
    cases: list[str], initial: list[float], device: str = "cpu"
) -> dict[tuple[str, float], tuple[Outcome, loss_scale.SavedScale]]:
    """Train the cases in this rank's world from each scale; return the outcomes and last scales."""
    torch.backends.cudnn.enabled = False
    scales = []

    class Noted(loss_scale.LossScale):
        def __init__(self, device):
            super().__init__(device)
            scales.append(self)

    outcomes = {}
    with (
        on_cpu,
        patch.object(loss_scale, "LossScale", Noted),
        Runtime(device, "fp16", timeout=30) as runtime,
    ):
        if runtime.world_size > 1:
            runtime.open_group()
        for case, first in itertools.product(cases, initial):
            with patch.object(loss_scale, "INITIAL", first), Case.of(case).default_dtype():
                outcome = run_case(runtime, case)
            outcomes[case, first] = outcome, scales[-1].saved()
    return outcomes
