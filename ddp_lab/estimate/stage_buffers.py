"""What a rank has in memory besides activations because of where its blocks begin and end: batches, and what it receives."""

import math
from collections.abc import Mapping

from ddp_lab.estimate.trace import Traced
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.pipeline import Pipeline


def stage_buffers(strategy: Strategy, place: int, samples: int, blocks: Mapping[str, Traced], kept: float, bf16: bool) -> float:
    """Return the bytes of a pipeline's buffers on a rank, which are in use during the whole step; 0 without a pipeline.

    torch's stages allocate once what they receive: the input of each micro-batch, and the gradient of its output. They keep an
    output until its backward pass. The first stage gets a copy of the batch, padded to a multiple of the micro-batches
    (`Pipeline._prepare`).

    Args:
        strategy: after `partition`.
        place: of the rank along pp.
        samples: of the batch that passes through the pipeline.
        blocks: the records of the rank's blocks, by name.
        kept: for how many micro-batches the rank keeps its activations.
        bf16: whether the computation is in bf16; then stages send bf16.
    """
    if not isinstance(strategy, Pipeline) or strategy.axes["pp"] == 1:
        return 0.0
    stages, parts = range(place, strategy.num_stages, strategy.axes["pp"]), strategy.parts
    sizes = [samples * math.prod(strategy.shapes[part.stop]) * (2 if bf16 else 4) for part in parts.parts[:-1]]
    total = sum(sizes[stage - 1] for stage in stages if stage > 0)
    for stage in stages:
        if stage < len(sizes):
            last, once = blocks[parts.names[parts.parts[stage].stop - 1]], sizes[stage] / strategy.num_microbatches
            total += sizes[stage] + (0 if last.keeps_output and last.output == once else once * kept)
    return total + (samples * math.prod(strategy.shapes[0]) * 4 if 0 in stages else 0)


def cast_images(strategy: Strategy, first: Traced | None, kept: float, bf16: bool) -> float:
    """Return the bytes of the images in bf16, which fully_shard casts before the first block and which that block keeps.

    Args:
        first: the record of the model's first block; None if the rank does not have it.
        kept: for how many micro-batches the rank keeps its activations.
        bf16: whether the computation is in bf16.
    """
    if not (isinstance(strategy, FSDP | Mesh) and bf16 and first is not None and first.keeps_input):
        return 0.0
    return first.input * kept
