"""The exposed communication of a step under each strategy, in seconds."""

from dataclasses import dataclass

from ddp_lab.estimate.division import Division
from ddp_lab.estimate.step_time import Links
from ddp_lab.estimate.trace import Traced
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.buckets import MiB
from ddp_lab.strategies.ddp import DDP
from ddp_lab.strategies.ddp_pipeline import DDPPipeline
from ddp_lab.strategies.dp import DP
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.scratch import LAST_BUCKET, Scratch
from ddp_lab.strategies.tp import TP

DDP_BUCKET = 25 * MiB  # torch's default, which DDPPipeline uses


@dataclass(frozen=True)
class Sizes:
    """What a rank sends from.

    Attributes:
        gradients: bytes of the gradients that it keeps.
        gathered: bytes of the parameters that it computes with, in the dtype in which they are gathered.
        unsharded: bytes of their gradients in float32; frozen parameters have none.
        tensors, trained, units: number of its parameters, of those that have gradients, and of the blocks that are gathered.
        mixed: whether it computes in bf16.
    """

    gradients: float
    gathered: float
    unsharded: float
    tensors: int
    trained: int
    units: int
    mixed: bool


def along_dp(strategy: Strategy, sizes: Sizes, links: Links, forward: float, backward: float) -> float:
    """Return the exposed seconds of summing gradients and gathering parameters.

    Args:
        forward, backward: seconds of the rank's passes, which may hide communication.
    """
    ranks = strategy.dp_size
    if isinstance(strategy, DP):  # through the first GPU: the parameters to all others, their gradients back
        return (strategy.num_devices - 1) * 2 * links.send(sizes.gradients)
    if isinstance(strategy, Mesh | FSDP):
        return sharded(strategy, sizes, links, forward, backward)
    if ranks == 1 or strategy.one_process:
        return 0.0
    if isinstance(strategy, Scratch):
        if strategy.algorithm == "bucketed":
            return overlapped(sizes.gradients, strategy.bucket_sizes[0], LAST_BUCKET, ranks, links, backward)
        calls = sizes.trained if strategy.algorithm in ("per_tensor", "star") else 1
        return links.all_reduce(sizes.gradients, ranks, calls=calls) * (ranks / 2 if strategy.algorithm == "star" else 1)
    if isinstance(strategy, DDP | DDPPipeline):
        bucket = strategy.bucket_cap_mb * MiB if isinstance(strategy, DDP) else DDP_BUCKET
        inner = strategy.axes.get("pp", 1)
        return overlapped(sizes.gradients, bucket, MiB, ranks, links, backward, inner)
    return links.all_reduce(sizes.gradients, ranks, strategy.axes.get("tp", 1))


def overlapped(
    nbytes: float, bucket: float, last: float, ranks: int, links: Links, backward: float, neighbours: int = 1
) -> float:
    """Return what is exposed of all-reduces of buckets during the backward pass: at least that of the last bucket."""
    calls = max(1.0, nbytes / bucket)
    whole = links.all_reduce(nbytes, ranks, neighbours, calls)
    return max(links.all_reduce(min(last, nbytes), ranks, neighbours), whole - backward)


def sharded(strategy: Mesh | FSDP, sizes: Sizes, links: Links, forward: float, backward: float) -> float:
    """Return what is exposed of gathering blocks and scattering gradients; the first gather and the last scatter always are."""
    inner = strategy.axes.get("tp", 1)
    shards = strategy.dp_size if isinstance(strategy, FSDP) else strategy.axes["shard"]
    copies = 1 if isinstance(strategy, FSDP) else strategy.axes["replicate"]
    again = strategy.reshard_after_forward if isinstance(strategy, FSDP) else strategy.axes["pp"] == 1
    units = max(1, sizes.units)
    gather = links.gather(sizes.gathered, shards, inner, units)
    scatter = links.gather(sizes.unsharded, shards, inner, units)
    summed = links.all_reduce(sizes.gradients, copies, inner * shards, units)
    ends = (gather + scatter + summed) / units
    return ends + max(0.0, gather - forward) + max(0.0, again * gather + scatter + summed - backward)


def along_tp(division: Division, block: Traced, links: Links) -> float:
    """Return the seconds of the collectives of a block along tp, forward and backward. No computation overlaps with them."""
    tp, size = division.tp, block.output
    if division.joined:  # outputs gathered; gradients of inputs summed
        calls = len(division.joined)
        return calls * (links.gather(size, tp) + links.all_reduce(block.input, tp))
    # A gather and a scatter take as long as one all-reduce, forward and again backward.
    pairs = len(division.summed)
    return 2 * pairs * links.all_reduce(size * (tp if division.scattered else 1), tp)


def is_tensor_parallel(strategy: Strategy) -> bool:
    """Return whether ranks share the layers."""
    return isinstance(strategy, TP | Mesh) and strategy.axes["tp"] > 1
