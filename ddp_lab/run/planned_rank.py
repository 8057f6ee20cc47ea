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
from ddp_lab.estimate.temporaries import temporaries_of
from ddp_lab.models.chain import Chain
from ddp_lab.run.job import Job
from ddp_lab.run.places import communicators, place_along_pp


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
    cfg, strategy, model = job.cfg, job.strategy, job.model
    share, make_optimizer = strategy.share(model, rank), build(cfg.optimizer)
    held = footprint(share, model, make_optimizer, cfg.ema is not None)
    here = on_device(held, share)
    samples = math.ceil(job.plan.samples_at_once / micro_batches(strategy))
    blocks = tracer.blocks(strategy, share, samples, compiled)
    gradients = dict.fromkeys(blocks, 0)
    for name, tensor in model.named_parameters():
        if tensor.requires_grad and share.has(name) and not share.offload:
            gradients[name.split(".")[0] if isinstance(model, Chain) else ""] += share.nbytes(name, tensor)
    device, fused = torch.device("cuda"), job.choices["optimizer.fused"].value is True
    checkpointing = getattr(strategy, "checkpointing", "none")
    memory = peak_memory(
        here,
        blocks,
        gradients,
        buckets_of(strategy, share, model, cfg.precision == "bf16"),
        micro_batches_kept(strategy, place_along_pp(strategy, rank)),
        checkpointing,
        temporaries_of(lambda held: job.options.settle(make_optimizer(held), device, fused), strategy.name != "tp")
        * here.gradients,
        data_bytes(job, constants),
        constants.context + constants.communicator * communicators(strategy),
    )
    computed = {
        name: torch.Size(share.size(name, tensor)).numel() for name, tensor in model.named_parameters() if share.has(name)
    }
    sizes = Sizes(
        gradients=held.gradients,
        gathered=sum(computed.values()) * (2 if cfg.precision == "bf16" else 4),
        unsharded=sum(computed.values()) * 4,
        tensors=len(computed),
        units=len(blocks) - 1 if LOSS in blocks else len(blocks),
    )
    divisions = {name: division_of(strategy, name, block) for name, block in tracer.named if name in blocks}
    return PlannedRank(memory, held, Passes(blocks, divisions, sizes, checkpointing, held.optimizer))


def data_bytes(job: Job, constants: Constants) -> float:
    """Return the bytes of a local batch in float32, of the dataset, if it is on the device, and of cuBLAS's workspace."""
    train, test = job.dataset.train, job.dataset.test
    batch = job.plan.samples_at_once * job.cfg.accumulate * (5 * math.prod(train.shape) + 8)
    whole = sum(split.size * (math.prod(split.shape) + 24) for split in (train, test))
    threads = 1 if job.options.cuda_graph else 2  # a captured backward pass runs in its caller's thread
    return batch + threads * constants.workspace + (whole if job.choices["data.loader"].value == "device" else 0)
