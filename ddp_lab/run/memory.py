"""The refusal of runs whose parameters, gradients and optimizer state alone do not fit, before anything is written.

The check needs shapes only and takes milliseconds. Activations are not counted; the alternatives that a refusal names are
predicted with them.
"""

import json
from collections.abc import Iterable
from dataclasses import replace

import torch

from ddp_lab.config.build import build
from ddp_lab.config.errors import ConfigError
from ddp_lab.estimate.advice import Prediction
from ddp_lab.estimate.cards import CARDS, Card, card_called
from ddp_lab.estimate.constants import BETWEEN_NODES
from ddp_lab.estimate.footprint import footprint, on_device
from ddp_lab.estimate.sizes import describe_bytes
from ddp_lab.run.advise import constants_for
from ddp_lab.run.advisor import Advisor
from ddp_lab.run.candidates import ALONE
from ddp_lab.run.job import Job
from ddp_lab.run.machine import Machine
from ddp_lab.strategies.split import Split

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
        f"parameters, gradients and optimizer state take {describe_bytes(needed)} on rank {rank}, whose GPU has "
        f"{describe_bytes(memory)}"
    )
    if needed <= memory:
        return text
    raise ConfigError(
        f"strategy={job.strategy.name}: {text}, and activations need more. {alternatives(job, memory)}. "
        "`ddp-lab advise` predicts all strategies"
    )


def alternatives(job: Job, memory: int) -> str:
    """Return what to use in place of a strategy that does not fit: the two that are predicted to be the best.

    All GPUs of the machines count, also those for which no rank was started. It takes as long as `ddp-lab advise`.

    Args:
        job: after `partition`.
        memory: bytes of a GPU.
    """
    runtime = job.runtime
    nodes, per_node = runtime.world_size // runtime.local_world_size, max(runtime.local_world_size, len(runtime.devices))
    card = replace(card_of(job.strategy.device), memory=memory)
    machine = Machine(card, per_node, nodes, BETWEEN_NODES)
    advice = Advisor(["..."], None, machine, constants_for(card), job).advise()

    def line(each: Prediction) -> str:
        ranks = 1 if each.overrides[0].removeprefix("strategy=") in ALONE else machine.gpus
        overrides = " ".join(each.overrides)
        how = overrides if ranks == runtime.world_size else f"`{each.launch}`"
        host = f", and {describe_bytes(each.host)} of host memory" if each.host else ""
        return f"{how} ({describe_bytes(each.memory.total)}{host})"

    number = f"{machine.gpus} such GPU{'s' * (machine.gpus > 1)}"
    if best := advice.ranked[:MOST_ALTERNATIVES]:
        return f"Use {' or '.join(map(line, best))}, the best of {len(advice.ranked)} that are predicted to fit on {number}"
    if not advice.predictions:
        return f"No strategy can be predicted: {advice.refused[0].name}: {advice.refused[0].reason.rstrip('.')}"
    least = sorted(advice.predictions, key=lambda each: each.memory.total)[:MOST_ALTERNATIVES]
    return (
        f"With activations and the CUDA context nothing is predicted to fit on {number}; the least memory need "
        f"{' and '.join(map(line, least))}. Use more or larger GPUs, a smaller batch_size, or accumulate=N"
    )


def card_of(device: torch.device) -> Card:
    """Return the data sheet of a GPU; of an unknown one that of an H100, as only ratios of times matter here."""
    here = device.type == "cuda" and torch.cuda.is_available()  # not in a planned launch
    known = card_called(torch.cuda.get_device_name(device)) if here else None
    return known or CARDS["H100"]
