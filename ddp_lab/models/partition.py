"""The cut of a chain into stages of consecutive blocks with about equal FLOPs."""

import copy
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import pairwise

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.models.chain import Chain
from ddp_lab.models.kept_state import state_kept
from ddp_lab.models.outputs import require_tensor
from ddp_lab.models.trial import meta_copy

BLOCK = "a block of the model"


class Partition:
    """An assignment of the blocks of a chain to stages.

    Args:
        chain: the model.
        cut_at: number of stages, which are cut by FLOPs; or names of the first block of the second,
            third, ... stage. Each stage gets at least one block, and its blocks are consecutive.

    Attributes:
        names: names of the blocks.
        flops: FLOPs of each block's forward pass for one sample.
        shapes: shape of one sample's activation before each block and after the last one, without
            the batch dimension.
        parts: indices of each stage's blocks.

    Raises:
        ConfigError: the chain has fewer blocks than stages, or `cut_at` does not describe a cut.
    """

    def __init__(self, chain: Chain, cut_at: int | Sequence[str]):
        stages = cut_at if isinstance(cut_at, int) else len(cut_at) + 1
        self.names = [name for name, _ in chain.named_children()]
        if stages > len(self.names):
            raise ConfigError(
                f"the model cannot be cut into {stages} stages: it has "
                f"{count(len(self.names), 'block')} "
                f"({', '.join(self.names)}) and a stage needs at least one. Use at most "
                f"{count(len(self.names), 'rank')}, strategy.devices or names in strategy.cut"
            )
        self.flops, self.shapes = trace(chain)
        self.parts = cut(self.flops, cut_at) if isinstance(cut_at, int) else self._cut_at(cut_at)

    def _cut_at(self, starts: Sequence[str]) -> list[range]:
        """Return the indices of each stage's blocks, for a cut in front of the named blocks."""
        allowed = self.names[1:]
        if any(name not in allowed for name in starts) or sorted(
            set(starts), key=allowed.index
        ) != list(starts):
            raise ConfigError(
                f"strategy.cut=[{','.join(starts)}]: must be blocks of the model in their order, "
                f"the first excluded: some of {', '.join(allowed)}"
            )
        bounds = [0, *(self.names.index(name) for name in starts), len(self.names)]
        return [range(start, stop) for start, stop in pairwise(bounds)]

    @property
    def shares(self) -> list[float]:
        """Return each stage's fraction of the FLOPs."""
        return [sum(self.flops[i] for i in part) / sum(self.flops) for part in self.parts]

    def describe(self, places: Sequence[object]) -> str:
        """Return a line with the blocks of each stage, its device or rank, and its FLOPs."""
        return ", ".join(
            f"{' '.join(self.names[i] for i in part)} on {place} ({share:.0%} of the FLOPs)"
            for part, place, share in zip(self.parts, places, self.shares, strict=True)
        )


def trace(chain: Chain) -> tuple[list[int], list[torch.Size]]:
    """Trace the forward pass of one sample on the meta device, which computes shapes only.

    Returns:
        The FLOPs of each block; the shape of the activation before each block and after the last
        one, without the batch dimension.
    """
    activation = torch.zeros(1, *chain.input_shape, dtype=chain.input_dtype, device="meta")
    flops = list[int]()
    shapes = [activation.shape[1:]]
    with torch.no_grad():
        for block in chain:
            count, output = trace_block(block, activation)
            activation = require_tensor(output, BLOCK)
            flops.append(count)
            shapes.append(activation.shape[1:])
    return flops, shapes


def trace_block(block: nn.Module, inputs: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return the FLOPs of a block for an input on the meta device, and its output there.

    A block that reads values, as by `.item()`, cannot run there. It gets a tensor of ones on the
    CPU.
    """
    on_meta = any(tensor.is_meta for tensor in block.parameters())
    expected = [] if on_meta else [Exception]
    keep_state = partial(state_kept, block, weights=False)
    with suppress(*expected), keep_state(), FlopCounterMode(display=False) as counter:
        output = meta_copy(block).eval()(inputs)
        return counter.get_total_flops(), output
    with keep_state(), FlopCounterMode(display=False) as counter:
        output = copy.deepcopy(block).eval()(torch.ones_like(inputs, device="cpu"))
    return counter.get_total_flops(), require_tensor(output, BLOCK).to("meta")


def cut(costs: list[int], stages: int) -> list[range]:
    """Cut a sequence of blocks into non-empty stages so that the most expensive one costs least.

    Of several such cuts, the first stage is the shortest possible, and the stages after it are cut
    likewise.

    Args:
        costs: cost of each block.
        stages: number of stages.

    Returns:
        The indices of each stage's blocks.
    """

    @cache
    def best(start: int, left: int) -> tuple[int, tuple[int, ...]]:
        """Return the ends of `left` stages from `start` on, and the lowest cost of the worst."""
        if left == 1:
            return sum(costs[start:]), (len(costs),)
        ends = range(start + 1, len(costs) - left + 2)
        rests = ((end, *best(end, left - 1)) for end in ends)
        return min(
            (max(sum(costs[start:end]), cost), (end, *others)) for end, cost, others in rests
        )

    return [range(start, stop) for start, stop in pairwise((0, *best(0, stages)[1]))]
