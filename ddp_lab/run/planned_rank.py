"""What one rank of a planned launch would hold and compute, from shapes alone."""

import math
from typing import NamedTuple

import torch

from ddp_lab.config.build import build
from ddp_lab.estimate.blocks import LOSS, Tracer
from ddp_lab.estimate.buckets import buckets_of, micro_batches_kept
from ddp_lab.estimate.constants import Constants
from ddp_lab.estimate.division import division_of
from ddp_lab.estimate.exposed import Sizes
from ddp_lab.estimate.footprint import Footprint, footprint, on_device
from ddp_lab.estimate.memory import Memory, peak_memory
from ddp_lab.estimate.schedule import Passes, micro_batches
from ddp_lab.estimate.stage_buffers import cast_images, stage_buffers
from ddp_lab.estimate.temporaries import temporaries_of
from ddp_lab.estimate.trace import Traced
from ddp_lab.models.chain import Chain
from ddp_lab.run.job import Job
from ddp_lab.run.places import communicators, place_along_pp
from ddp_lab.strategies.ddp import DDP
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.share import Share
from ddp_lab.training.speed.auto import AUTO


class PlannedRank(NamedTuple):
    """What is predicted for one rank."""

    memory: Memory
    held: Footprint
    passes: Passes


def predict_rank(job: Job, rank: int, compiled: bool, tracer: Tracer, constants: Constants) -> PlannedRank:
    """Return the peak memory of a rank, what it holds and what it computes.

    Args:
        job: with a plan and a partition.
        rank: which rank of the launch.
        compiled: whether the step is compiled.
        tracer: traces the blocks of the model.
        constants: of the GPU.
    """
    cfg, strategy, bf16 = job.cfg, job.strategy, job.cfg.precision == "bf16"
    share, make_optimizer = strategy.share(job.model, rank), build(cfg.optimizer)
    held = footprint(share, job.model, make_optimizer, cfg.ema is not None)
    here, place = on_device(held, share), place_along_pp(strategy, rank)
    samples, kept = job.plan.samples_at_once, micro_batches_kept(strategy, place)
    blocks = tracer.blocks(strategy, share, math.ceil(samples / micro_batches(strategy)), compiled)
    sizes = sizes_of(job, share, held, blocks.keys() - {LOSS})
    sharded = isinstance(strategy, FSDP | Mesh)
    # A warm-up begins with a pass without collectives; shards' gradients of it stay unsharded until the next pass.
    several = cfg.accumulate * micro_batches(strategy) > 1 or (sharded and warms_up(job, compiled))
    fused = job.choices["optimizer.fused"].value is True
    memory = peak_memory(
        here,
        blocks,
        gradients_of(job, share, blocks),
        buckets_of(strategy, share, job.model, bf16),
        kept,
        several * (sizes.unsharded if sharded else here.gradients),
        checkpointing := getattr(strategy, "checkpointing", "none"),
        temporary=here.gradients
        * temporaries_of(
            lambda few: job.options.settle(make_optimizer(few), torch.device("cuda"), fused, held.parameters // 4),
            strategy.name != "tp",
        ),
        copies=copies_of(job, here, compiled),
        data=data_bytes(job)
        + workspaces(job, constants, any(each.kind == "matmul" for block in blocks.values() for each in block.forward))
        + stage_buffers(strategy, place, samples, blocks, kept, bf16)
        + cast_images(strategy, blocks.get(tracer.named[0][0]), kept, bf16),
        nccl=constants.communicator * communicators(strategy),
        context=constants.context,
    )
    divisions = {name: division_of(strategy, name, block) for name, block in tracer.named if name in blocks}
    return PlannedRank(memory, held, Passes(blocks, divisions, sizes, checkpointing, held.optimizer))


def sizes_of(job: Job, share: Share, held: Footprint, blocks: set[str]) -> Sizes:
    """Return what the rank sends from."""
    computed = [
        (torch.Size(share.size(name, tensor)).numel(), tensor.requires_grad)
        for name, tensor in job.model.named_parameters()
        if share.has(name)
    ]
    trained = [elements for elements, has_gradient in computed if has_gradient]
    mixed = job.cfg.precision == "bf16"
    gathered = (2 if mixed else 4) * sum(elements for elements, _ in computed)
    return Sizes(held.gradients, gathered, 4 * sum(trained), len(computed), len(trained), len(blocks), mixed)


def gradients_of(job: Job, share: Share, blocks: dict[str, Traced]) -> dict[str, int]:
    """Return the bytes of each block's gradients that the rank keeps on its GPU."""
    gradients, records, record = dict.fromkeys(blocks, 0), dict[str, str](), ""
    for block, _ in job.model.named_children():
        record = block if block in blocks else record  # that of a graph has the name of its first block
        records[block] = record
    for name, tensor in job.model.named_parameters():
        if tensor.requires_grad and share.has(name) and not share.offload:
            gradients[records[name.split(".")[0]] if isinstance(job.model, Chain) else ""] += share.nbytes(name, tensor)
    return gradients


def warms_up(job: Job, compiled: bool) -> bool:
    """Return whether steps whose effects are undone come before the first one: to compile, to capture or to time it."""
    return compiled or job.options.cuda_graph or job.options.compile == AUTO


def copies_of(job: Job, here: Footprint, compiled: bool) -> int:
    """Return the bytes of what a warm-up restores: of the optimizer's state only in a second one, as the first creates it."""
    if not warms_up(job, compiled):
        return 0
    twice = job.options.cuda_graph or job.options.compile == AUTO  # to capture, or to time the step
    return here.parameters + here.buffers + here.averages + twice * here.optimizer


def data_bytes(job: Job) -> float:
    """Return the bytes of a local batch in uint8 and float32, and of the dataset, if it is on the device."""
    train = job.dataset.train
    batch = job.plan.samples_at_once * job.cfg.accumulate * (5 * math.prod(train.shape) + 8)
    whole = sum(found.size * (math.prod(found.shape) + 24) for found in job.dataset.sets.values())
    return batch + (whole if job.choices["data.loader"].value == "device" else 0)


def workspaces(job: Job, constants: Constants, multiplies: bool) -> float:
    """Return the bytes of cuBLAS's workspaces, of which each thread has one.

    Args:
        multiplies: whether the rank has layers that cuBLAS computes, which allocates a workspace when it is first used.
    """
    # A captured backward pass runs in its caller's thread. Under DDP there was one more workspace (H200s, 2026-11-23).
    # A compiled step is captured in a thread of its own (kernel_choice.py). Whether speed=auto compiles is not known yet, and
    # neglected.
    chosen = job.options.compile not in (False, AUTO) and not job.strategy.collective_passes
    threads = 1 if job.options.cuda_graph and not chosen and not isinstance(job.strategy, DDP) else 2
    return threads * constants.workspace if multiplies else 0
