"""The peak memory of a rank, from what it holds and from what its blocks allocate, walked through in the order of a step.

A step has three moments at which memory is highest: the backward pass of a block, when the blocks before it still keep their
activations and those after it already have gradients; the sum of the gradients over the ranks; and the optimizer's step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ddp_lab.estimate.buckets import Buckets
from ddp_lab.estimate.footprint import Footprint
from ddp_lab.estimate.trace import Traced


@dataclass(frozen=True)
class Memory:
    """What a rank has in memory at the peak of a step, in bytes.

    Attributes:
        parameters, gradients, optimizer, averages, buffers: of its part of the model; gradients are those at this moment.
        activations: what is kept for the backward pass, and temporary results.
        buckets: copies of gradients or parameters that the strategy sends or has gathered.
        copies: of weights and optimizer state, which the warm-up before compiling or capturing restores.
        data: the batch and, with data.loader=device, the dataset; cuBLAS's workspaces, and buffers between stages.
        nccl, context: NCCL's buffers and the CUDA context, which torch does not count as allocated.
    """

    parameters: float
    gradients: float
    optimizer: float
    averages: float
    buffers: float
    activations: float
    buckets: float
    copies: float
    data: float
    nccl: float
    context: float

    @property
    def allocated(self) -> float:
        """What torch.cuda.max_memory_allocated reports."""
        return self.total - self.nccl - self.context

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def peak_memory(
    held: Footprint,
    blocks: dict[str, Traced],
    gradients: dict[str, int],
    buckets: Buckets,
    micro_batches: float,
    added: float,
    checkpointing: str,
    temporary: float,
    copies: float,
    data: float,
    nccl: float,
    context: float,
) -> Memory:
    """Return the memory at the highest moment of a step.

    Args:
        held: of `footprint`.
        blocks: the record of each block of the rank.
        gradients: bytes of each block's gradients as the rank keeps them.
        buckets: what the strategy sends or gathers.
        micro_batches: number of micro-batches whose activations are kept at a time.
        added: bytes of the gradients to which those of another micro-batch or accumulation step are added; 0 if there is one.
        checkpointing: none, block or selective.
        temporary: bytes that the optimizer's step allocates.
        copies: bytes of copies of weights and optimizer state.
        data, nccl, context: bytes, as in `Memory`.
    """
    state = held.parameters, 0, held.optimizer, held.averages, held.buffers
    base = Memory(*state, 0, buckets.constant, copies, data, nccl, context)
    names, kept = list(blocks), kept_by(list(blocks.values()), checkpointing)
    before = [0.0, *accumulate(kept)]
    waiting = (micro_batches - 1) * before[-1]  # other micro-batches, which have passed forward and not yet backward
    later = list(accumulate([gradients.get(name, 0) for name in reversed(names)], initial=0))[::-1][1:]
    fixed = max(added, held.gradients if buckets.gradients_stay else 0)
    moments = [
        replace(
            base,
            activations=waiting + before[place] + block.backward_peak,
            gradients=max(fixed, later[place]),
            buckets=buckets.constant + buckets.gathered.get(name, 0),
        )
        for place, (name, block) in enumerate(blocks.items())
    ]
    moments.append(replace(base, gradients=held.gradients, buckets=buckets.constant + buckets.at_end))
    moments.append(replace(base, gradients=held.gradients, activations=temporary))
    return max(moments, key=lambda moment: moment.total)


def kept_by(blocks: Sequence[Traced], checkpointing: str) -> list[float]:
    """Return what each block keeps for the backward pass; an output that the next block keeps counts once, as this block's."""
    sizes: list[float] = []
    wanted = False
    for block in reversed(blocks):
        if checkpointing == "none" or not sizes:
            inner, kept = block.saved, block.keeps_output or wanted
        else:  # the next block's input is kept in any case
            inner, kept = block.selective if checkpointing == "selective" else 0, True
        sizes.append(inner + block.output * (kept and not block.in_place))
        wanted = block.keeps_input or (block.in_place and kept)
    return sizes[::-1]
