"""Cutting a chain into consecutive stages of about equal work."""

import copy
from itertools import combinations, pairwise

import torch
from torch.utils.flop_counter import FlopCounterMode

from ddp_lab.models.chain import Chain


def block_flops(chain: Chain) -> list[int]:
    """Floating-point operations of each block's forward pass for one sample, counted on the meta device, at no cost."""
    chain = copy.deepcopy(chain).to("meta").eval()
    activation = torch.empty(1, *chain.input_shape, device="meta")
    flops = []
    with torch.no_grad():
        for block in chain:
            with FlopCounterMode(display=False) as counter:
                activation = block(activation)
            flops.append(counter.get_total_flops())
    return flops


def cut(costs: list[int], stages: int) -> list[range]:
    """The blocks of each stage: consecutive, none empty, the dearest stage as cheap as it can be.

    Tries every cut: at most 126 of ResNet-18's ten blocks.
    """
    n = len(costs)
    bounds = [(0, *inner, n) for inner in combinations(range(1, n), stages - 1)]
    best = min(bounds, key=lambda b: max(sum(costs[start:stop]) for start, stop in pairwise(b)))
    return [range(start, stop) for start, stop in pairwise(best)]
