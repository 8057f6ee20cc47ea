"""A training step and its loader on the CPU, made without a config."""

import torch

from ddp_lab.data.datasets import Synthetic
from ddp_lab.data.loader import DeviceLoader, LoaderOptions
from ddp_lab.models.simple_cnn import simple_cnn
from ddp_lab.strategies.single import Single
from ddp_lab.training.ema import EMA
from ddp_lab.training.schedule import cosine, make_scheduler
from ddp_lab.training.step import Step, StepOptions
from ddp_lab.world.runtime import Runtime

SAMPLES, BATCH = 60, 24  # two full batches and a partial one


def make_step(fused: bool | None = None, ema: float | None = None, **options) -> tuple[Step, DeviceLoader]:
    """Return a step of SGD with momentum over two epochs, always from the same weights, and the loader of its batches."""
    torch.manual_seed(0)
    strategy = Single(Runtime("cpu"))
    strategy.setup(simple_cnn(1, 8, 10))
    optimizer = torch.optim.SGD(strategy.module.parameters(), lr=0.1, momentum=0.9, fused=fused)
    averages = None if ema is None else EMA(strategy, ema)
    step = Step(strategy, optimizer, make_scheduler(optimizer, cosine, 2, 3, 0), StepOptions(**options), averages)
    data = Synthetic(SAMPLES, 8, 1, 8, 10).load().train
    made = LoaderOptions(BATCH, 0, 1, strategy.device, [0.5], [0.2], shuffle=True, crop_padding=1, flip=True)
    return step, DeviceLoader(data, made)
