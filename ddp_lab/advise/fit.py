"""Whether a run fits in the memory of its devices: a state that does not is refused, and batch_size=auto is the largest that does.

The alternatives that a refusal names are planned with activations. Without a GPU or `memory_limit`, no state is refused.
"""

import json
import math
import os
import resource
import socket
import sys
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from omegaconf import DictConfig, OmegaConf

from ddp_lab.config.build import build
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.run.job import Job, prepare
from ddp_lab.run.materialize import materialize
from ddp_lab.training.optimizer_state import state_of
from ddp_lab.world.runtime import Runtime

PLANNED, TAKEN = 0.9, 0.95  # shares of the memory that the plan of a chosen batch, and its real step, may take
MULTIPLE = 8  # local batches are multiples of it, where that many samples fit
MOST_PLANS, MOST_STEPS = 16, 4  # that choose a batch, and that check it


def memory_of(cfg: DictConfig, runtime: Runtime) -> list[int]:
    """Return the bytes of a device, 0 if not known, and those that are free: the least of all ranks. Collective."""
    if cfg.memory_limit:
        own = [int(cfg.memory_limit * 2**30)] * 2
    elif runtime.device.type == "cuda":
        own = list(reversed(torch.cuda.mem_get_info(runtime.device)))
    else:
        own = [0, psutil.virtual_memory().available // runtime.local_world_size]
    everyone = runtime.collect("memory", json.dumps(own))
    return runtime.agree("memory", lambda: [min(each) for each in zip(*map(json.loads, everyone or []), strict=True)])


def check_memory(job: Job) -> str:
    """Check that every rank's part of the model fits on its device, and return how much it takes. Collective.

    Activations are not counted: a real step shows what they need. Only a state that one device cannot hold completely is planned.

    Args:
        job: after `partition`.

    Raises:
        ConfigError: parameters, gradients, optimizer state and averages do not fit on some rank.
    """
    memory, _ = memory_of(job.cfg, job.runtime)
    return job.runtime.agree("state", lambda: check_state(job, memory)) if memory else ""


def check_state(job: Job, memory: int) -> str:
    """As `check_memory`, on one rank and for devices of some bytes."""
    copies = 2 + state_of(build(job.cfg.optimizer))[0] + (job.cfg.ema is not None)
    needed = copies * sum(parameter.nbytes for parameter in job.model.parameters())
    what, where = "parameters, gradients and optimizer state take", f"a device has {describe_bytes(memory)}"
    if needed <= memory:
        return f"{what} at most {describe_bytes(needed)}, {where}"
    from ddp_lab.advise.plan import STATE, CannotPlan  # loads torch's DTensor

    try:
        needed, rank = max(
            (sum(size for kind, size in plan.held.items() if not (plan.host and kind in STATE)), plan.rank)
            for plan in plan_launch(job)
        )
    except CannotPlan as error:
        return f"not checked, because the step cannot be planned: {error}"
    text = f"{what} {describe_bytes(needed)} on rank {rank}, {where}"
    if needed <= memory:
        return text
    raise ConfigError(f"strategy={job.strategy.name}: {text}, and activations need more. {alternatives(job, memory)}")


def plan_launch(job: Job, **changes: int) -> list[Any]:
    """Return the plans of the ranks of a launch that differ.

    Args:
        job: of a real rank.
        changes: values of keys of the config.
    """
    from ddp_lab.advise.plan import PlannedRuntime, plan_ranks

    cfg, real = cast("DictConfig", OmegaConf.merge(job.cfg, changes)), job.runtime
    free, gpus, kind = real.free_memory() if real.device.type == "cuda" else 0, len(real.devices), real.device.type
    ranks = real.world_size, real.local_world_size, cfg.precision
    return plan_ranks(cfg, job.dataset, job.model, lambda rank: PlannedRuntime(*ranks, rank, gpus, free, kind))[1]


def alternatives(job: Job, memory: int) -> str:
    """Return what to use in place of a strategy that does not fit: the two simplest that fit, activations included.

    All GPUs of the machines count, also those for which no rank was started. It takes as long as `ddp-lab advise`.
    """
    from ddp_lab.advise.advisor import REMEDY, Advisor, Devices, Row

    runtime = job.runtime
    nodes, per_node = runtime.world_size // runtime.local_world_size, max(runtime.local_world_size, len(runtime.devices))
    devices = Devices("", per_node, nodes, memory, kind=runtime.device.type)
    number = f"{devices.number} such device{'s' * (devices.number > 1)}"
    try:
        advisor = Advisor(job.cfg, job.dataset, job.model, devices, ["..."]).advise()
    except ConfigError as error:
        return str(error)

    def line(row: Row) -> str:
        how = " ".join(row.overrides) if row.ranks == runtime.world_size else f"`{row.launch}`"
        host = f", and {describe_bytes(row.fullest.host)} a rank of host memory" if row.fullest.host else ""
        return f"{how} ({describe_bytes(row.fullest.total)}{host})"

    if best := advisor.ranked[:2]:
        return f"Use {' or '.join(map(line, best))}, the simplest of {len(advisor.ranked)} that fit on {number}; see ddp-lab advise"
    least = sorted(advisor.rows, key=lambda row: row.fullest.total)[:2]
    return f"With activations nothing fits on {number}; the least memory need {' and '.join(map(line, least))}. {REMEDY}"


def describe_bytes(size: float) -> str:
    """Return a number of bytes with its unit: GiB, MiB or KiB."""
    unit, name = next((pair for pair in ((2**30, "GiB"), (2**20, "MiB")) if size >= 0.1 * pair[0]), (2**10, "KiB"))
    return f"{size / unit:,.2f} {name}"


def settle_batch(cfg: DictConfig, runtime: Runtime, resumed: Path | None) -> str:
    """Replace batch_size=auto and accumulate=auto by numbers, and return a line about them for the log. Collective.

    Rank 0 plans; then all ranks take a real step in processes of their own, which may run out of memory.

    Args:
        cfg: is changed.
        runtime: the ranks.
        resumed: directory of the run that is resumed, whose batch is kept; on fewer devices it is accumulated in more steps.

    Raises:
        ConfigError: not even the smallest batch fits, or the step cannot be planned.
    """
    auto = [key for key in ("batch_size", "accumulate") if cfg[key] == "auto"]
    if not auto:
        return ""
    before = runtime.agree("batch before", lambda: recorded(resumed)) if resumed else None
    if before is not None:
        cfg.batch_size = before[0] if "batch_size" in auto else cfg.batch_size
        cfg.accumulate, auto = "auto", ["accumulate"]
    elif len(auto) > 1:
        raise ConfigError("accumulate=auto: needs a fixed global batch; use a number for batch_size, or leave accumulate out")
    key, memory = auto[0], memory_of(cfg, runtime)[1]
    job = Job(cast("DictConfig", OmegaConf.merge(cfg, {key: 1})), runtime, with_weights=False)
    _ = job.dataset, job.model  # on all ranks, because the first one of a machine prepares them
    first = before[1] if before else 1
    for share in (PLANNED, 0.85 * PLANNED, 0.7 * PLANNED):
        cfg[key], planned = runtime.agree("batch", lambda share=share: choose_for(job, key, int(share * memory), first))
        if before is not None and cfg.accumulate == before[1]:
            return f"batch_size={cfg.batch_size}: kept from the run that is resumed"
        taken, problem = take_real_step(cfg, runtime)
        if problem is None and taken <= TAKEN * memory:
            return (
                f"{key}=auto: {cfg[key]}, planned with {describe_bytes(planned)} of the {describe_bytes(memory)} of a device, and "
                f"{describe_bytes(taken)} in a real step; lr_scaling={cfg.lr_scaling}"
            )
    raise ConfigError(
        f"{key}=auto: a real step with {key}={cfg[key]} did not fit in {describe_bytes(memory)}"
        f"{f' ({problem})' if problem else f', it took {describe_bytes(taken)}'}. Use a number"
    )


def recorded(run: Path) -> list[int]:
    """Return batch_size and accumulate of the config of a run."""
    cfg = OmegaConf.load(run / "config.yaml")
    return [cfg.batch_size, cfg.accumulate]


def choose_for(job: Job, key: str, budget: int, first: int) -> list[int]:
    """Return the value of a key that is auto, and the bytes of the plan with it. The other arguments are as in `choose`.

    Raises:
        ConfigError: none fits, or the step cannot be planned.
    """
    from ddp_lab.advise.plan import CannotPlan

    def used(value: int) -> float:
        return max(plan.total for plan in plan_launch(job, **{key: value}))

    try:
        value, planned = choose(job.cfg, job.strategy, job.dataset.train.size, key, used, budget, first)
    except CannotPlan as error:
        raise ConfigError(f"{key}=auto: the step cannot be planned: {error}. Use a number") from None
    if planned > budget:
        raise ConfigError(
            f"{key}=auto: not even {key}={value} fits: strategy={job.strategy.name} needs {describe_bytes(planned)} a device, "
            f"{describe_bytes(budget)} are free with room to spare. {alternatives(job, budget)}"
        )
    return [value, int(planned)]


def choose(
    cfg: DictConfig, strategy: Strategy, samples: int, key: str, used: Callable[[int], float], budget: float, first: int = 1
) -> tuple[int, float]:
    """Return the largest batch_size, or the smallest accumulate, that fits, and the bytes that it needs.

    If none fits, it is the one that needs the least.

    Args:
        cfg: the other keys.
        strategy: how many replicas share a batch, and how many micro-batches there are.
        samples: size of the training set, which a batch does not exceed.
        key: "batch_size" or "accumulate".
        used: returns the bytes of a device for a value; grows about linearly with the batch.
        budget: bytes that may be used.
        first: the smallest value of accumulate.
    """
    micro = getattr(strategy, "num_microbatches", 1)
    shared = strategy.replicas if cfg.scaling == "strong" else 1
    if key == "accumulate":
        local_batch = max(1, cfg.batch_size // shared)
        values = [n for n in range(first, max(first, local_batch // micro) + 1) if local_batch % n == 0] or [first]
        value = values[min(bisect_left(values, True, key=lambda n: used(n) <= budget), len(values) - 1)]
        return value, used(value)
    finest = shared * micro * cfg.accumulate
    for unit in (math.lcm(MULTIPLE * shared, finest), finest):
        most = max(1, samples * shared // strategy.replicas // unit)
        number, needed = largest(lambda n, unit=unit: used(n * unit), most, budget)
        if needed <= budget:
            break
    return number * unit, needed


def largest(used: Callable[[int], float], most: int, budget: float) -> tuple[int, float]:
    """Return the largest number up to `most` whose use fits the budget, within 2 %, and its use; 1 if none fits.

    The use grows about linearly, so that a line through two numbers leads to the next one.
    """
    known = {1: used(1)}
    low, high, n = 1, most + 1, 2
    while known[1] <= budget and high - low > max(1, low // 64):
        n = min(max(n, low + 1), high - 1)
        known[n] = used(n)
        low, high = (n, high) if known[n] <= budget else (low, n)
        a, b = (low, high) if high in known else sorted(known)[-2:]
        n = a + int((budget - known[a]) * (b - a) / max(known[b] - known[a], 1))
    return low, known[low]


def take_real_step(cfg: DictConfig, runtime: Runtime) -> tuple[int, str | None]:
    """Take a real step on all ranks, and return the most bytes that a device needed, and what went wrong. Collective."""
    port, problem, taken = runtime.agree("port", free_port), None, 0
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            taken = pool.submit(real_step, cast("dict[str, Any]", OmegaConf.to_container(cfg)), port).result()
        except Exception as error:  # out of memory, or the process was killed
            problem = describe_error(error)
    everyone = runtime.collect("real step", json.dumps([taken, problem or ""]))
    found = runtime.agree("real step", lambda: json.dumps(sorted(map(json.loads, everyone or []), key=lambda each: (each[1] != "", each))[-1]))
    taken, problem = json.loads(found)
    return taken, problem or None


def free_port() -> float:
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def real_step(config: dict[str, Any], port: int) -> int:
    """Take two real steps in this process, which is a rank as the one that started it, and return the bytes that they needed."""
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    cfg = OmegaConf.create(config)
    unit = 1024 if sys.platform == "linux" else 1
    before = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Runtime(cfg.device, cfg.precision, STEP_TIMEOUT) as runtime:
        job = prepare(cfg, runtime, with_weights=False)
        with job.options.switches(runtime):
            training = materialize(job)
            job.loaders["train"].set_epoch(1)
            job.strategy.train()
            batch = next(iter(job.loaders["train"]))
            for _ in range(2):
                training.step(batch)
            if runtime.device.type == "cuda":
                free, total = torch.cuda.mem_get_info(runtime.device)
                return ...
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
