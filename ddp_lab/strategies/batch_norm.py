"""BatchNorm under data parallelism, made explicit.

local: every rank normalises by the mean and variance of its own share of the batch, so the result depends on the number of
ranks. sync: by those of the whole batch, as one device would; that costs two small collectives a layer, in each direction. A
share may then be empty: the samples repeated to fill up a ragged batch are left out (Strategy.forward_backward).
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.models.chain import Chain
from ddp_lab.strategies.collectives import sum_over_ranks

BatchNorm = Literal["local", "sync"]


class SyncBatchNorm(nn.BatchNorm2d):
    """A BatchNorm2d that normalises by the statistics of all ranks' shares.

    In place of torch.nn.SyncBatchNorm, which has no kernels for CPUs, and whose backward gives a rank without samples no
    gradient at all: under FSDP that rank left out collectives, and both waited for ever (two H200s, torch 2.11).

    Args:
        layer: the layer that it takes the place of, and whose parameters and buffers it shares.
        sum_over_ranks: returns the sum of the ranks' tensors, [n]; autograd can go through it.
    """

    def __init__(self, layer: nn.BatchNorm2d, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(layer.num_features, layer.eps, layer.momentum, device="meta")  # allocates nothing
        self.weight, self.bias = layer.weight, layer.bias
        for name, buffer in layer.named_buffers():
            setattr(self, name, buffer)
        self.train(layer.training)
        self.sum_over_ranks = sum_over_ranks

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(inputs)
        dtype, inputs = inputs.dtype, inputs.to(self.running_mean.dtype)  # sums of bf16 would lose the statistics
        size = inputs.new_full((1,), inputs.numel() // inputs.size(1))
        total = self.sum_over_ranks(torch.cat([inputs.sum((0, 2, 3)), size]))
        mean, count = total[:-1] / total[-1], total[-1].detach()
        centred = inputs - mean.view(-1, 1, 1)
        variance = self.sum_over_ranks(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centred * scale.view(-1, 1, 1) + self.bias.view(-1, 1, 1)).to(dtype)


def set_batch_norm(model: Chain, mode: BatchNorm, group: dist.ProcessGroup | None = None) -> Chain:
    """Replace the BatchNorm layers of `model` (on its device) where `mode` asks for it; `group`: the ranks to normalise over.

    The parameters and buffers stay the same objects under the same names.
    """
    if mode == "local":
        return model
    # Never compiled: compiled with its collectives, ResNet-18 took another step (weights 0.15 off; two H200s, torch 2.11).
    total = torch.compiler.disable(partial(sum_over_ranks, group=group))
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            model.set_submodule(path, SyncBatchNorm(layer, total))
    return model
