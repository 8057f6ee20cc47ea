"""The time of a step under a strategy: passes of all micro-batches over the stages, communication, the optimizer's step."""

from dataclasses import dataclass

from ddp_lab.estimate.division import Division
from ddp_lab.estimate.exposed import Sizes, along_dp, along_tp
from ddp_lab.estimate.recorder import COMPUTED
from ddp_lab.estimate.step_time import Device, Links, StepTime, Work
from ddp_lab.estimate.trace import Traced
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.dp import DP
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.pipeline import Pipeline
from ddp_lab.strategies.scratch import Scratch
from ddp_lab.strategies.split import Split

# Python's work in eager mode, in launches. From steps of LeNet, ResNet-18 and ViT-S/16 on two H200s, torch 2.11, 2026-11-23.
SHARDED_KERNELS, SHARDED_EACH = 48, 3  # with which fully_shard gathers, sums and scatters a unit, and for each parameter of it
HOOKS_KERNELS, HOOKS_EACH = 8, 2  # of a unit that stays gathered, each micro-batch; in bf16 each gradient is added in float32
COPIES, COPIES_EACH = 20e-6, 4e-6  # seconds of its copies for a unit, and for each parameter, whose kernels are small
RANKS_KERNELS = 12  # of a step whose gradients are summed over ranks
SCRATCH_KERNELS = 1  # for each gradient that `scratch` copies into a bucket and back
PIPELINE_KERNELS = 32  # of a micro-batch: the schedule, sends and receives
HOST = 25e9  # assumed bytes per second of copies to and from host memory, and of the CPU's share of its bandwidth
OPTIMIZER_KERNELS = 0.3  # launches of a foreach optimizer for each parameter


@dataclass(frozen=True)
class Passes:
    """What a rank computes with one micro-batch.

    Attributes:
        blocks: record of each of its blocks, by name.
        divisions: how tp divides them.
        sizes: what it sends from.
        checkpointing: none, block or selective.
        optimizer: bytes of the optimizer's state.
    """

    blocks: dict[str, Traced]
    divisions: dict[str, Division]
    sizes: Sizes
    checkpointing: str
    optimizer: float


def step_time(strategy: Strategy, ranks: list[Passes], device: Device, links: Links, accumulate: int) -> StepTime:
    """Return the time of a step.

    Args:
        strategy: after `partition`.
        ranks: one rank of each stage, or one rank.
        device: the card.
        links: between the GPUs.
        accumulate: number of gradient-accumulation steps.
    """
    times = [passes(rank, device) for rank in ranks]
    slowest = max(range(len(ranks)), key=lambda place: sum(work.seconds for work in times[place]))
    rank, (forward, backward) = ranks[slowest], times[slowest]
    rounds = accumulate * micro_batches(strategy)
    computed = (forward + backward) * rounds
    kernels = computed + updates(rank, device)
    if isinstance(strategy, FSDP | Mesh):
        kernels += sharding(strategy, rank.sizes, rounds, accumulate)
    elif strategy.dp_size > 1:
        kernels += Work(0, RANKS_KERNELS + SCRATCH_KERNELS * rank.sizes.trained * isinstance(strategy, Scratch))
    if isinstance(strategy, Pipeline) and strategy.axes["pp"] > 1:
        kernels += Work(0, PIPELINE_KERNELS * rounds)
    # One Python process launches the kernels of all devices.
    launched = strategy.num_devices if isinstance(strategy, DP | Split) else 1
    launching = device.launching(Work(kernels.seconds, kernels.kernels * launched))
    in_tp = rounds * sum(
        along_tp(division, rank.blocks[name], links) for name, division in rank.divisions.items() if division.tp > 1
    )
    # In a CUDA graph and in eager mode alike, passes hide communication while they compute, not while they wait.
    hidden = forward.seconds * rounds, backward.seconds * rounds + launching / 2
    in_dp = along_dp(strategy, rank.sizes, links, *hidden)
    bubble = along_pp = 0.0
    if is_cut(strategy):
        stages = len(ranks)
        of_rank = strategy.num_stages // stages if isinstance(strategy, Pipeline) else 1
        # Python does not wait for other ranks: it launches a stage's kernels before their inputs have arrived.
        bubble = accumulate * computed.seconds / rounds * (stages - 1) / of_rank
        cut = max((list(each.blocks.values())[-1].output for each in ranks[:-1]), default=0)
        along_pp = (rounds + stages - 1) * 2 * of_rank * links.send(cut, crosses_machines(strategy, links.per_node))
    to_host = offloaded(rank) if getattr(strategy, "offload", False) else 0.0
    return StepTime(kernels.seconds, launching, in_dp + in_tp + along_pp + to_host, bubble)


def sharding(strategy: FSDP | Mesh, sizes: Sizes, rounds: int, accumulate: int) -> Work:
    """Return the work of fully_shard: of each block, and of the model or stage, which contains them.

    Args:
        sizes: of the rank.
        rounds, accumulate: number of micro-batches in all, and of gradient-accumulation steps.
    """
    units, each = sizes.units + 1, sizes.tensors
    total = Work()
    if strategy.dp_size > 1:  # without other ranks along dp there are no collectives
        copies = COPIES * units + COPIES_EACH * each
        total += Work(copies, SHARDED_KERNELS * units + SHARDED_EACH * each) * accumulate
    if rounds > accumulate:
        total += Work(0, HOOKS_KERNELS * units + HOOKS_EACH * sizes.trained * sizes.mixed) * rounds
    return total


def micro_batches(strategy: Strategy) -> int:
    """Return the number of micro-batches that a strategy divides a batch into."""
    if isinstance(strategy, Split) or (isinstance(strategy, Pipeline) and strategy.axes["pp"] > 1):
        return strategy.num_microbatches
    return 1


def is_cut(strategy: Strategy) -> bool:
    """Return whether micro-batches pass through several stages."""
    return isinstance(strategy, Split) or (isinstance(strategy, Pipeline) and strategy.axes["pp"] > 1)


def crosses_machines(strategy: Strategy, per_node: int) -> bool:
    """Return whether two consecutive stages of some pipeline are on different machines.

    Args:
        strategy: whose micro-batches pass through several stages.
        per_node: number of GPUs of a machine.
    """
    if not isinstance(strategy, Pipeline):
        return False
    pp = strategy.axes["pp"]
    others = strategy.dp_size * strategy.axes.get("tp", 1)
    # In `mesh` the stage varies slowest with the rank, in `pipeline` and `ddp_pipeline` fastest.
    firsts, step = (range(others), others) if isinstance(strategy, Mesh) else (range(0, pp * others, pp), 1)
    pipelines = [range(first, first + pp * step, step) for first in firsts]
    return any(len({rank // per_node for rank in ranks}) > 1 for ranks in pipelines)


def passes(rank: Passes, device: Device) -> tuple[Work, Work]:
    """Return the forward and the backward pass of a micro-batch; the backward pass computes again what is checkpointed."""
    forward, backward = Work(), Work()
    for block in rank.blocks.values():
        once = device.work(block.forward)
        forward += once
        backward += device.work(block.backward)
        if rank.checkpointing == "block":
            backward += once
        elif rank.checkpointing == "selective":
            backward += device.work(operation for operation in block.forward if operation.kind not in COMPUTED)
    return forward, backward


def offloaded(rank: Passes) -> float:
    """Return the seconds of copying shards to the GPU twice and gradients back, and of the optimizer's step on the CPU."""
    return (3 * rank.sizes.gradients + 2.5 * (3 * rank.sizes.gradients + 2 * rank.optimizer)) / HOST


def updates(rank: Passes, device: Device) -> Work:
    """Return the optimizer's step: it reads and writes parameters and state, and reads gradients, in two or three passes."""
    traffic = 2.5 * (2 * rank.sizes.gradients + 2 * rank.optimizer + rank.sizes.gradients)
    return Work(device.traffic(traffic), OPTIMIZER_KERNELS * rank.sizes.trained)
