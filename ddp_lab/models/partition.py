"""Cutting a chain into consecutive stages of about equal work."""

import copy
from collections.abc import Sequence
from itertools import combinations, pairwise

import torch
from torch.utils.flop_counter import FlopCounterMode

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain


class Partition:
    """The blocks of a chain, dealt to stages.

    Args:
        stages: how many; each gets consecutive blocks, and at least one.
        starts: the names of the blocks that the second, third, ... stage begin with; None: cut by FLOPs.

    Attributes:
        names: of the blocks.
        flops: of each block's forward pass for one sample.
        shapes: one sample's on the way in front of each block, and behind the last, without the batch dim.
        parts: the numbers of each stage's blocks.

    Raises:
        ConfigError: fewer blocks than stages, or `starts` does not make `stages` of them.
    """

    def __init__(self, chain: Chain, stages: int, starts: Sequence[str] | None = None):
        self.names = [name for name, _ in chain.named_children()]
        if stages > len(self.names):
            raise ConfigError(
                f"the model cannot be cut into {stages} stages: it has {len(self.names)} blocks ({', '.join(self.names)}) and "
                f"a stage needs at least one. Use at most {len(self.names)} ranks, strategy.devices or strategy.num_stages"
            )
        self.flops, self.shapes = trace(chain)
        self.parts = cut(self.flops, stages) if starts is None else self._cut_at(starts, stages)

    def _cut_at(self, starts: Sequence[str], stages: int) -> list[range]:
        if len(starts) != stages - 1:
            raise ConfigError(
                f"strategy.cut={list(starts)}: has {len(starts)} names, but {stages} stages need {stages - 1}: "
                "the first block of every stage but the first"
            )
        allowed = self.names[1:]
        if any(name not in allowed for name in starts) or sorted(set(starts), key=allowed.index) != list(starts):
            raise ConfigError(
                f"strategy.cut={list(starts)}: must be blocks of the model in their order, the first excluded: "
                f"some of {', '.join(allowed)}"
            )
        bounds = [0, *(self.names.index(name) for name in starts), len(self.names)]
        return [range(start, stop) for start, stop in pairwise(bounds)]

    @property
    def shares(self) -> list[float]:
        """Each stage's part of the FLOPs."""
        return [sum(self.flops[i] for i in part) / sum(self.flops) for part in self.parts]

    def describe(self, places: Sequence[object]) -> str:
        """Which blocks are on which place, and with how much of the work."""
        return ", ".join(
            f"{' '.join(self.names[i] for i in part)} on {place} ({share:.0%} of the FLOPs)"
            for part, place, share in zip(self.parts, places, self.shares, strict=True)
        )


def trace(chain: Chain) -> tuple[list[int], list[torch.Size]]:
    """FLOPs of each block's forward pass for one sample, and the shapes between the blocks; on the meta device, at no cost."""
    chain = copy.deepcopy(chain).to("meta").eval()
    activation = torch.empty(1, *chain.input_shape, device="meta")
    flops, shapes = [], [activation.shape[1:]]
    with torch.no_grad():
        for block in chain:
            with FlopCounterMode(display=False) as counter:
                activation = block(activation)
            flops.append(counter.get_total_flops())
            shapes.append(activation.shape[1:])
    return flops, shapes


def cut(costs: list[int], stages: int) -> list[range]:
    """The blocks of each stage: consecutive, none empty, the dearest stage as cheap as it can be.

    Tries every cut: at most 126 of ResNet-18's ten blocks.
    """
    n = len(costs)
    bounds = [(0, *inner, n) for inner in combinations(range(1, n), stages - 1)]
    best = min(bounds, key=lambda b: max(sum(costs[start:stop]) for start, stop in pairwise(b)))
    return [range(start, stop) for start, stop in pairwise(best)]
