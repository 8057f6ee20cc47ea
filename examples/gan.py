"""Two models that are trained in turn: a generator of points, and a judge of them.

python examples/gan.py, or torchrun --nproc_per_node=2 examples/gan.py ddp.
"""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from ddp_lab import Lab

torch.set_default_dtype(torch.float64)  # in float32 the rounding of two ranks would grow


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs))


def circle(samples: int = 1280) -> TensorDataset:
    """Return points, [2], close to a circle of radius 1, and targets that nothing needs."""
    angle = torch.rand(samples) * 2 * torch.pi
    points = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(samples, 2)
    return TensorDataset(points, torch.zeros(samples))


def unused(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Stand for the loss, which this loop computes by itself."""
    return outputs.sum(1)


with Lab(strategy=sys.argv[1] if len(sys.argv) > 1 else "single", seed=0) as lab:
    points = circle()
    adam = partial(torch.optim.Adam, lr=2e-3, betas=(0.5, 0.9))
    generator = lab.trainer(network(4, 2), unused, adam, batch_size=128)
    judge = lab.trainer(network(2, 1), unused, adam, batch_size=128)
    for epoch in range(20):
        for real, _ in judge.batches(points, epoch):
            count = len(real)
            with torch.no_grad():
                fake = generator.forward(generator.randn(count, 4, name="to be judged"))
            right = F.softplus(-judge.forward(real)).sum()
            wrong = F.softplus(judge.forward(fake)).sum()
            judge.backward(right + wrong, count)
            judge.update()

            fake = generator.forward(generator.randn(count, 4, name="to convince"))
            with judge.frozen():
                generator.backward(F.softplus(-judge.forward(fake)).sum(), count)
            loss = generator.update()
    drawn = generator.predict(torch.randn(1000, 4, generator=torch.Generator().manual_seed(0)))
    lab.log(epoch=20, loss=loss, radius=drawn.norm(dim=1).mean())
