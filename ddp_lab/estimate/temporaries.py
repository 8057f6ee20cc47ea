"""What an optimizer's step allocates temporarily."""

import torch
from torch import nn

from ddp_lab.config.build import for_cpu
from ddp_lab.estimate.optimizer_state import MakeOptimizer
from ddp_lab.estimate.recorder import Recorder


def temporaries_of(make_optimizer: MakeOptimizer, foreach: bool) -> float:
    """Return the bytes that a step on a GPU allocates temporarily, as a multiple of the parameters'.

    There torch's optimizers update all parameters in one call (foreach), unless they are told otherwise or are fused, which
    allocates nothing.

    Args:
        make_optimizer: constructs the optimizer of a list of parameters, with the options that it has on a GPU.
        foreach: whether all parameters are updated in one call; otherwise the temporaries of one parameter are neglected.
    """
    probe = nn.Parameter(torch.zeros(1024))
    optimizer = for_cpu(make_optimizer([probe]))
    if not foreach or any(group.get("fused") for group in optimizer.param_groups):
        return 0.0
    for group in optimizer.param_groups:
        group |= {"foreach": True} if group.get("foreach", True) is None else {}
    probe.grad = torch.zeros_like(probe)
    optimizer.step()  # it allocates the state
    with Recorder() as recorder:
        optimizer.step()
    return round(recorder.peak / probe.nbytes)
