"""The refusal of runs whose parameters, gradients and optimizer state alone do not fit, before anything is written.

Activations are not counted: a real step shows what they need. The alternatives that a refusal names are planned with them.
"""

import json

import torch
from omegaconf import DictConfig

from ddp_lab.config.errors import ConfigError
from ddp_lab.run.job import Job
from ddp_lab.training.optimizer_state import state_of


def card_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU's memory; None for other devices, whose memory is not known."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def check_memory(cfg: DictConfig, job: Job) -> str:
    """Check that every rank's part of the model fits on its GPU, and return how much it takes. Collective.

    Raises:
        ConfigError: it does not fit on some rank.
    """
    everyone = job.runtime.collect("memory", json.dumps(card_memory(job.strategy.device)))
    return job.runtime.agree("memory", lambda: verdict(cfg, job, [json.loads(each) for each in everyone or []]))


def verdict(cfg: DictConfig, job: Job, memories: list[int | None]) -> str:
    """Return how much of its GPU the fullest rank needs. Only a state that one GPU cannot hold completely is planned.

    Args:
        cfg: the config of the job.
        job: the run.
        memories: bytes of the GPU of each rank.

    Raises:
        ConfigError: the state does not fit on the smallest GPU.
    """
    known = [memory for memory in memories if memory is not None]
    if not known:
        return ""
    memory, copies = min(known), 2 + state_of(job.optimizer)[0] + (job.recipe.ema is not None)
    needed = copies * sum(parameter.nbytes for parameter in job.model.parameters())
    what, where = "parameters, gradients and optimizer state take", f"a GPU has {describe_bytes(memory)}"
    if needed <= memory:
        return f"{what} at most {describe_bytes(needed)}, {where}"
    from ddp_lab.advise.alternatives import alternatives, state_bytes  # loads torch's DTensor

    try:
        needed, rank = state_bytes(cfg, job)
    except RuntimeError as error:  # CannotPlan
        return f"not checked, because the step cannot be planned: {error}"
    text = f"{what} {describe_bytes(needed)} on rank {rank}, {where}"
    if needed <= memory:
        return text
    raise ConfigError(
        f"strategy={job.strategy.name}: {text}, and activations need more. {alternatives(cfg, job, memory)}. "
        "`ddp-lab advise` plans all strategies"
    )


def describe_bytes(size: float) -> str:
    """Return a number of bytes with its unit: GiB, MiB or KiB."""
    unit, name = next((pair for pair in ((2**30, "GiB"), (2**20, "MiB")) if size >= 0.1 * pair[0]), (2**10, "KiB"))
    return f"{size / unit:,.2f} {name}"
