"""What a launch needs for its state, and what to use in place of a strategy whose state does not fit."""

from dataclasses import replace

import torch
from omegaconf import DictConfig

from ddp_lab.advise.advisor import Advisor, Row, places
from ddp_lab.advise.candidates import ALONE
from ddp_lab.advise.check import describe_bytes
from ddp_lab.advise.machine import CARDS, Machine, card_called
from ddp_lab.advise.plan import STATE, plan_rank
from ddp_lab.advise.planned import PlannedRuntime
from ddp_lab.config.errors import ConfigError
from ddp_lab.run.job import Job

MOST_ALTERNATIVES = 2


def state_bytes(cfg: DictConfig, job: Job) -> tuple[int, int]:
    """Return the bytes of parameters, gradients, optimizer state and averages of the fullest rank's GPU, and the rank."""
    found = [
        (sum(size for kind, size in plan.held.items() if not (plan.host and kind in STATE)), rank)
        for rank in places(job.strategy)
        for plan in plan_rank(cfg, job.dataset, job.model, runtime_of(job, rank))
    ]
    return max(found)


def runtime_of(job: Job, rank: int) -> PlannedRuntime:
    """Return the planned runtime of a rank of the launch of a job."""
    runtime, gpus = job.runtime, len(job.runtime.devices)
    free = runtime.free_memory() if runtime.device.type == "cuda" else 0
    return PlannedRuntime(runtime.world_size, runtime.local_world_size, runtime.precision, rank, gpus, free)


def alternatives(cfg: DictConfig, job: Job, memory: int) -> str:
    """Return what to use in place of a strategy that does not fit: the two simplest that fit, activations included.

    All GPUs of the machines count, also those for which no rank was started. It takes as long as `ddp-lab advise`.

    Args:
        cfg: the config of the job.
        job: the run.
        memory: bytes of a GPU.
    """
    runtime = job.runtime
    nodes, per_node = runtime.world_size // runtime.local_world_size, max(runtime.local_world_size, len(runtime.devices))
    known = card_called(torch.cuda.get_device_name(job.strategy.device)) if torch.cuda.is_available() else None
    machine = Machine(replace(known or CARDS["H100"], memory=memory), per_node, nodes)
    number = f"{machine.gpus} such GPU{'s' * (machine.gpus > 1)}"
    try:
        advice = Advisor(["..."], None, machine, (cfg, job.dataset, job.model)).advise()
    except ConfigError as error:
        return str(error).rstrip(".")

    def line(row: Row) -> str:
        ranks = 1 if row.overrides[0].removeprefix("strategy=") in ALONE else machine.gpus
        how = " ".join(row.overrides) if ranks == runtime.world_size else f"`{row.launch}`"
        host = f", and {describe_bytes(row.fullest.host)} a rank of host memory" if row.fullest.host else ""
        return f"{how} ({describe_bytes(row.fullest.total)}{host})"

    if best := advice.ranked[:MOST_ALTERNATIVES]:
        return f"Use {' or '.join(map(line, best))}, the simplest of {len(advice.ranked)} that fit on {number}"
    least = sorted(advice.rows, key=lambda row: row.fullest.total)[:MOST_ALTERNATIVES]
    return (
        f"With activations and the CUDA context nothing fits on {number}; the least memory need "
        f"{' and '.join(map(line, least))}. Use more or larger GPUs, a smaller batch_size, or accumulate=N"
    )
