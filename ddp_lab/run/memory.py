"""The refusal of runs whose parameters, gradients and optimizer state alone do not fit, before anything is written.

It needs shapes only and takes milliseconds. Activations are not counted; `python -m ddp_lab.advise` predicts them, too.
"""

import json
from collections.abc import Iterable

import torch

from ddp_lab.config.build import build
from ddp_lab.config.errors import ConfigError
from ddp_lab.estimate.footprint import footprint, on_device
from ddp_lab.estimate.planned import PlannedRuntime
from ddp_lab.run.candidates import ALONE, candidates, with_strategy
from ddp_lab.run.job import Job
from ddp_lab.strategies.split import Split

GiB = 2**30
MOST_ALTERNATIVES = 2


def card_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU's memory; None for other devices, whose memory is not known."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def check_memory(job: Job) -> str:
    """Check that every rank's part of the model fits on its GPU, and return how much it takes. Collective; after `partition`.

    Raises:
        ConfigError: it does not fit on some rank.
    """
    runtime, strategy, memory = job.runtime, job.strategy, card_memory(job.strategy.device)
    own = range(len(strategy.parts.parts)) if isinstance(strategy, Split) else [runtime.rank]
    needed = held_bytes(job, own)
    everyone = runtime.collect("memory", json.dumps([needed, memory]))
    return runtime.agree("memory", lambda: verdict(job, [tuple(json.loads(each)) for each in everyone or []]))


def held_bytes(job: Job, ranks: Iterable[int]) -> int:
    """Return the bytes of parameters, gradients and optimizer state of the fullest of some ranks, or devices under split."""
    make, ema = build(job.cfg.optimizer), job.cfg.ema is not None
    shares = [job.strategy.share(job.model, rank) for rank in ranks]
    return max(on_device(footprint(share, job.model, make, ema), share).total for share in shares)


def verdict(job: Job, ranks: list[tuple[int, int | None]]) -> str:
    """Return how much of its GPU the fullest rank needs.

    Args:
        ranks: bytes that each rank needs, and of its GPU.

    Raises:
        ConfigError: some rank needs more.
    """
    rank, (needed, memory) = max(enumerate(ranks), key=lambda pair: pair[1][0] - (pair[1][1] or 0))
    if memory is None:
        return ""
    text = (
        f"parameters, gradients and optimizer state take {needed / GiB:,.2f} GiB on rank {rank}, whose GPU has "
        f"{memory / GiB:,.2f} GiB"
    )
    if needed <= memory:
        return text
    others = alternatives(job, memory)
    use = f"Use {' or '.join(others)}" if others else "No other strategy fits on these GPUs: use more or larger ones"
    raise ConfigError(
        f"strategy={job.strategy.name}: {text}, and activations need more. {use}; `python -m ddp_lab.advise` predicts the "
        "memory of all strategies"
    )


def alternatives(job: Job, memory: int) -> list[str]:
    """Return the overrides of the simplest other strategies whose ranks would need at most three quarters of `memory`."""
    found: list[str] = []
    ranks, per_node = job.runtime.world_size, job.runtime.local_world_size
    for candidate in candidates(ranks, per_node, checkpointing=False):
        if candidate.strategy in ALONE or len(found) == MOST_ALTERNATIVES:
            continue
        other = Job(with_strategy(job.cfg, candidate), PlannedRuntime(ranks, per_node, job.runtime.precision))
        other.dataset, other.made = job.dataset, job.made
        try:
            other.partition()
        except ConfigError:
            continue
        if held_bytes(other, range(ranks)) <= 0.75 * memory:
            found.append(" ".join(candidate.overrides))
    return found
