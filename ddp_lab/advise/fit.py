"""Whether a run fits in the memory of its devices: a state that does not is refused, and batch_size=auto is the largest that does."""

import json
import math
import os
import resource
import socket
import sys
from bisect import bisect_left
from concurrent.futures import ProcessPoolExecutor
from functools import partial
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

PLANNED, TAKEN = (0.9, 0.75, 0.6), 0.95  # shares of the memory that the plan of a batch may take, in turn, and its real step
MULTIPLE = 8  # local batches are multiples of it, where that many samples fit
STEP_TIMEOUT = 120.0  # seconds after which the ranks of a real step give up waiting for one that ran out of memory


def memory_of(cfg: DictConfig, runtime: Runtime) -> list[int]:
    """Return the bytes of a device, 0 if not known, and those that are free: the least of all ranks. Collective."""
    if cfg.memory_limit:
        own = [int(cfg.memory_limit * 2**30)] * 2
    elif runtime.device.type == "cuda":
        own = [*reversed(torch.cuda.mem_get_info(runtime.device))]
    else:
        own = [0, psutil.virtual_memory().available // runtime.local_world_size]
    everyone = runtime.collect("memory", json.dumps(own))
    return runtime.agree("memory", lambda: [min(each) for each in zip(*map(json.loads, everyone or []), strict=True)])


def check_memory(job: Job) -> str:
    """Check that every rank's part of the model fits on its device, and return how much it takes. Collective.

    Activations are not counted: a real step shows what they need. Only a state that one device cannot hold completely is planned.

    Args:
        job: of which the strategy has not changed the model.

    Raises:
        ConfigError: parameters, gradients, optimizer state and averages do not fit on some rank.
    """
    memory, _ = memory_of(job.cfg, job.runtime)
    return job.runtime.agree("state", lambda: check_state(job, memory)) if memory else ""


def check_state(job: Job, memory: int) -> str:
    """As `check_memory`, on one rank, for devices with `memory` bytes."""
    copies = 2 + state_of(build(job.cfg.optimizer))[0] + (job.cfg.ema is not None)
    needed = copies * sum(parameter.nbytes for parameter in job.model.parameters())
    what, where = "parameters, gradients and optimizer state take", f"a device has {describe_bytes(memory)}"
    if needed <= memory:
        return f"{what} at most {describe_bytes(needed)}, {where}"
    from ddp_lab.advise.plan import CannotPlan  # loads torch's DTensor

    try:
        needed, rank = max((plan.state, plan.rank) for plan in plan_launch(job))
    except CannotPlan as error:
        return f"not checked: {error}"
    text = f"{what} {describe_bytes(needed)} on rank {rank}, {where}"
    if needed <= memory:
        return text
    raise ConfigError(f"strategy={job.strategy.name}: {text}, and activations need more. {alternatives(job, memory)}")


def plan_launch(job: Job, changes: dict[str, int] | None = None) -> list[Any]:
    """Return the plans of the ranks of a real launch that differ, with changes of its config."""
    from ddp_lab.advise.plan import plan_ranks
    from ddp_lab.advise.planned import PlannedRuntime

    cfg, real = cast("DictConfig", OmegaConf.merge(job.cfg, changes or {})), job.runtime
    kind, gpus = real.device.type, len(real.devices)
    place = PlannedRuntime(real.world_size, real.local_world_size, cfg.precision, 0, gpus, 0, kind)
    place.free = real.free_memory() if kind == "cuda" else 0
    return plan_ranks(cfg, job.dataset, job.model, place)[1]


def alternatives(job: Job, memory: int) -> str:
    """Return what to use in place of a strategy that does not fit: the two simplest that fit, activations included.

    All GPUs of the machines count, also those for which no rank was started. It takes as long as `ddp-lab advise`.
    """
    from ddp_lab.advise.advisor import REMEDY, Advisor
    from ddp_lab.advise.devices import Devices

    runtime = job.runtime
    nodes, per_node = runtime.world_size // runtime.local_world_size, max(runtime.local_world_size, len(runtime.devices))
    devices = Devices("", per_node, nodes, memory, kind=runtime.device.type)
    advisor = Advisor(job.cfg, job.dataset, job.model, devices, ["..."]).advise()
    best = advisor.ranked[:2] or sorted(advisor.rows, key=lambda row: row.fullest.total)[:2]
    named = [
        f"{' '.join(row.overrides) if row.ranks == runtime.world_size else f'`{row.launch}`'} ({describe_bytes(row.fullest.total)}"
        + (f", and {describe_bytes(row.fullest.host)} a rank of host memory)" if row.fullest.host else ")")
        for row in best
    ]
    if advisor.ranked:
        return f"Use {' or '.join(named)}, the simplest of {len(advisor.ranked)} that fit on {per_node * nodes} such devices"
    return f"With activations nothing fits on {per_node * nodes} such devices; the least need {' and '.join(named)}. {REMEDY}"


def describe_bytes(size: float) -> str:
    """Return a number of bytes with its unit: GiB, MiB or KiB."""
    unit, name = next((pair for pair in ((2**30, "GiB"), (2**20, "MiB")) if size >= 0.1 * pair[0]), (2**10, "KiB"))
    return f"{size / unit:,.2f} {name}"


def settle_batch(cfg: DictConfig, runtime: Runtime, resumed: Path | None = None) -> str:
    """Replace batch_size=auto or accumulate=auto by a number, and return a line about it for the log. Collective.

    Rank 0 plans; then all ranks take a real step in processes of their own, which may run out of memory.

    Args:
        cfg: is changed.
        runtime: the ranks.
        resumed: directory of the run that is resumed. Its batch is kept, on fewer devices with more steps of accumulation.

    Raises:
        ConfigError: not even the smallest batch fits, or the step cannot be planned.
    """
    auto = [key for key in ("batch_size", "accumulate") if cfg[key] == "auto"]
    if not auto:
        return ""
    before = runtime.agree("batch before", partial(recorded, resumed)) if resumed else None
    if before:
        cfg.batch_size, cfg.accumulate = (before[0] if "batch_size" in auto else cfg.batch_size), "auto"
    elif len(auto) > 1:
        raise ConfigError("accumulate=auto: needs a fixed global batch; use a number for batch_size, or leave accumulate out")
    key, memory = "accumulate" if before else auto[0], memory_of(cfg, runtime)[1]
    job = Job(cast("DictConfig", OmegaConf.merge(cfg, {key: 1})), runtime, with_weights=False)
    _ = job.dataset, job.model  # on all ranks, because the first one of a machine prepares them
    problem = ""
    for share in PLANNED:
        values = values_of(job, key, before[1] if before else 1)
        cfg[key] = runtime.agree("batch", partial(choose, job, key, values, int(share * memory)))
        if before and cfg.accumulate == before[1]:
            return f"batch_size={cfg.batch_size}, accumulate={cfg.accumulate}: those of the run that is resumed"
        taken, problem = take_real_step(cfg, runtime)
        if not problem and taken <= TAKEN * memory:
            text = f"{key}=auto: {cfg[key]}. A real step took {describe_bytes(taken)} of the {describe_bytes(memory)} of a device"
            return f"{text}; batch_size={cfg.batch_size}, lr_scaling={cfg.lr_scaling}"
    found = problem or f"takes {describe_bytes(taken)} of {describe_bytes(memory)}"
    raise ConfigError(f"{key}=auto: a real step with {key}={cfg[key]} does not fit: {found}. Use a number")


def recorded(run: Path) -> list[int]:
    """Return batch_size and accumulate in the config of a run."""
    cfg = OmegaConf.load(run / "config.yaml")
    return [cfg.batch_size, cfg.accumulate]


def values_of(job: Job, key: str, first: int) -> list[int]:
    """Return the values that batch_size or accumulate may have; those that need the most memory first.

    A batch is at most the training set, and its size within 3 % of any other. All steps of accumulation are equal.

    Args:
        job: with 1 for this key.
        key: which one.
        first: the smallest value of accumulate.
    """
    strategy, cfg = job.strategy, job.cfg
    shared = strategy.replicas if cfg.scaling == "strong" else 1
    micro = getattr(strategy, "num_microbatches", 1)
    if key == "accumulate":
        local_batch = cfg.batch_size // shared
        return [n for n in range(first, max(first, local_batch // micro) + 1) if local_batch % n == 0] or [first]
    finest = shared * micro * cfg.accumulate
    unit = math.lcm(MULTIPLE * shared, finest)
    most = job.dataset.train.size * shared // strategy.replicas // unit
    sizes = [unit * n for n in range(most, 0, -1) if n % 2 ** max(0, n.bit_length() - 6) == 0]
    return sizes + [finest * n for n in range(unit // finest - 1, 0, -1)]


def choose(job: Job, key: str, values: list[int], budget: int) -> float:
    """Return the first value with which the plan fits the budget, in bytes. The other arguments are as in `values_of`.

    Raises:
        ConfigError: none fits, or the step cannot be planned.
    """
    from ddp_lab.advise.plan import CannotPlan

    def needed(value: int) -> float:
        return max(plan.total for plan in plan_launch(job, {key: value}))

    try:
        place = bisect_left(values, True, key=lambda value: needed(value) <= budget)
    except CannotPlan as error:
        raise ConfigError(f"{key}=auto: {error}. Use a number") from None
    if place < len(values):
        return values[place]
    raise ConfigError(
        f"{key}=auto: not even {key}={values[-1]} fits: strategy={job.strategy.name} needs {describe_bytes(needed(values[-1]))} of "
        f"a device, {describe_bytes(budget)} are free with room to spare. {alternatives(job, budget)}"
    )


def take_real_step(cfg: DictConfig, runtime: Runtime) -> tuple[int, str]:
    """Take a real step on all ranks; return the most bytes that a device needed, and what went wrong or "". Collective."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = int(runtime.agree("port", lambda: listener.getsockname()[1]))
    own = [0, ""]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            own[0] = pool.submit(real_step, cast("dict[str, Any]", OmegaConf.to_container(cfg)), port).result()
        except Exception as error:  # out of memory, or the process was killed
            own[1] = describe_error(error)
    everyone = [json.loads(each) for each in runtime.collect("real step", json.dumps(own)) or []]
    taken = runtime.agree("bytes of a step", lambda: max(each[0] for each in everyone))
    return taken, runtime.agree("problem of a step", lambda: max(each[1] for each in everyone))


def real_step(config: dict[str, Any], port: int) -> int:
    """Take two real steps in this process, a rank like the one that started it, and return the bytes of its device in use."""
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    cfg = OmegaConf.create(config)
    with Runtime(cfg.device, cfg.precision, STEP_TIMEOUT) as runtime:
        before = bytes_in_use(runtime)
        job = prepare(cfg, runtime, with_weights=False)
        with job.options.switches(runtime):
            training = materialize(job)
            job.loaders["train"].set_epoch(1)
            job.strategy.train()
            batch = next(iter(job.loaders["train"]))
            for _ in range(2):
                training.step(batch)
            return bytes_in_use(runtime) - before


def bytes_in_use(runtime: Runtime) -> int:
    """Return the bytes of the GPU that are in use, torch's cache included; of a CPU rank the most that this process has had."""
    if runtime.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(runtime.device)
        return total - free
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)
