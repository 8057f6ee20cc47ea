"""The optimizer's fused kernel, which updates all parameters at once, or its compiled step in place of it."""

import torch

from ddp_lab.speed.options import PerformanceOptions
from ddp_lab.training.optimizer import can_be_fused, has_shards

FEW = 1_000_000  # elements


def configure_optimizer(
    optimizer: torch.optim.Optimizer, options: PerformanceOptions, device: torch.device
) -> torch.optim.Optimizer:
    """Set the optimizer's options that are left to this launch, and return it. Called before the optimizer has a state.

    A CUDA graph requires that it reads its learning rate and step counters on the GPU. AdamW is fused in all runs on GPUs:
    torch's default, foreach, needs temporary memory of the size of all parameters, and is slow with parameters on the host.

    Args:
        optimizer: of the strategy's parameters.
        options: of the run. The optimizer of a captured step is fused, too, unless it is compiled.
        device: the device of this rank.
    """
    compiled = options.cuda_graph and options.compile in (True, "tuned") and compiles_optimizer(optimizer)
    wanted = (options.cuda_graph or options.fused) and can_be_fused(optimizer)
    adamw = isinstance(optimizer, torch.optim.AdamW) and device.type == "cuda"
    for group in optimizer.param_groups:
        if options.cuda_graph and "capturable" in group:
            group["capturable"] = True
        left = adamw and group["fused"] is None and group["foreach"] is None  # tp sets foreach
        if not compiled and (wanted or left):
            group["fused"] = True
    return optimizer


def compiles_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step that is captured and compiled compiles its optimizer, too, in place of torch's fused kernel.

    A fused kernel of few elements does not fill a GPU: LeNet's 129,068 take 20 us in place of 2. With ResNet-18's 11 million a
    compiled optimizer saves 0.5 % of a step, but compiling it takes 5 s, from the cache 1 s (an H200, docs/log/benchmarks.md).
    """
    elements = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    return not has_shards(optimizer) and (elements < FEW or not can_be_fused(optimizer))


def set_fused(optimizer: torch.optim.Optimizer, fused: bool | None) -> None:
    """Select the fused kernel of the optimizer; None leaves the choice to torch."""
    for group in optimizer.param_groups:
        if "fused" in group:
            group["fused"] = fused
