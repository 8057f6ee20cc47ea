"""Whether a run fits in the memory of its devices.

A state that does not fit is refused. batch_size=auto is the largest batch that fits.
"""

import math
import os
import socket
from bisect import bisect_left
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from ddp_lab.advise.tp_prediction import predict_here
from ddp_lab.checkpoints.find import run_of
from ddp_lab.config.build import Config, construct, find_target
from ddp_lab.config.change import as_config, changed, load_yaml, with_references
from ddp_lab.config.errors import ConfigError, count, describe_error
from ddp_lab.data.dataset import Dataset
from ddp_lab.launchers.preflight import check_network
from ddp_lab.run.build import build as build_job
from ddp_lab.run.build import make_task, prepare
from ddp_lab.run.build_data import load_dataset
from ddp_lab.run.build_settings import find_resumed
from ddp_lab.run.job import Job
from ddp_lab.run.model_trial import make_trial
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.optimizer import state_copies
from ddp_lab.world.device import peak_memory_bytes, size
from ddp_lab.world.runtime import Runtime

if TYPE_CHECKING:
    from ddp_lab.advise.advisor import Advisor

PLANNED = (0.9, 0.75, 0.6)  # shares of the memory that the plan of a batch may take, in turn
TAKEN = 0.95  # the share that its real step may take
MULTIPLE = 8  # local batches are multiples of it, where that many samples fit
# what the first step of a CPU rank loads and starts: gloo, oneDNN, their threads
LIBRARIES = 0.25 * 2**30
LARGEST = 2**16  # samples of a batch of a stream, which has no number of samples
# seconds after which the ranks of a real step give up waiting for one that ran out of memory
STEP_TIMEOUT = 120.0


def memory_of(cfg: Config, runtime: Runtime) -> list[int]:
    """Return the bytes of a device, 0 if unknown, and those that are free: the least of all ranks.

    Collective.
    """
    if cfg.memory_limit:
        local_bytes = [int(cfg.memory_limit * 2**30)] * 2
    elif runtime.device.type == "cuda":
        local_bytes = [*reversed(torch.cuda.mem_get_info(runtime.device))]
    else:
        local_bytes = [0, psutil.virtual_memory().available // runtime.local_world_size]
    return runtime.gather_and_decide(
        "memory", local_bytes, lambda by_rank: [min(each) for each in zip(*by_rank, strict=True)]
    )


def advisor_of(
    cfg: Config, dataset: Dataset, model: nn.Module, runtime: Runtime, memory: float
) -> "Advisor":
    """Return the advisor of a launch whose ranks are real; its own strategy has no overrides.

    Planning loads torch's DTensor, so that it is imported where it is needed.
    """
    from ddp_lab.advise.advisor import Advisor
    from ddp_lab.advise.devices import Devices

    alone = find_target("strategy._target_", cfg.strategy["_target_"]).one_process
    here = runtime.local_world_size
    devices = Devices(
        "",
        len(runtime.devices) if alone else here,
        runtime.world_size // here,
        memory,
        kind=runtime.device.type,
    )
    return Advisor(
        cfg=cfg,
        dataset=dataset,
        model=model,
        devices=devices,
        free=runtime.free_memory() if devices.kind == "cuda" else 0,
        common=["..."],
    )


def alternatives(advisor: "Advisor", runtime: Runtime) -> str:
    """Return what to use in place of a strategy that does not fit.

    These are the two simplest that fit, activations included.

    All GPUs of the machines count, also those for which no rank was started. It takes as long as
    `ddp-lab advise`.
    """
    devices = replace(advisor.devices, per_node=max(runtime.local_world_size, len(runtime.devices)))
    advisor = replace(advisor, devices=devices).advise()
    if not advisor.ranked:
        return f"With activations, on {count(devices.number, 'device')}: {advisor.conclusion}"
    launches = [f"`{row.launch}` ({size(round(row.fullest.total))})" for row in advisor.ranked]
    return (
        f"Use {' or '.join(launches[:2])}, the simplest of {len(launches)} that fit on "
        f"{devices.number} such devices"
    )


def prepare_in_memory(cfg: Config, runtime: Runtime) -> Job:
    """Construct a run as `run.build.prepare`, in the memory of its devices.

    Its batch is chosen before, and its memory is checked after that.

    Collective.

    Raises:
        ConfigError: the config cannot be used, a machine cannot take part in the run, or its state
            does not fit.
    """
    note = ""
    if "auto" in (cfg.batch_size, cfg.accumulate):
        check_network(runtime)
        source = find_resumed(cfg, runtime)
        note = choose_batch(cfg, runtime, run_of(source) if source else None)
    job = prepare(cfg, runtime, [note] if note else [])
    check_memory(cfg, job)
    prediction = predict_here(job)
    if prediction is not None:
        job.notes.append(str(prediction))
    return job


def check_memory(cfg: Config, job: Job) -> None:
    """Check that every rank's part of the model fits on its device. Collective.

    Activations are not counted: a real step shows what they need. A state that one device could
    hold completely is not planned, and a run that cannot be planned is not refused.

    Raises:
        ConfigError: parameters, gradients, optimizer state and averages do not fit on some rank.
    """
    # how much of a host's memory a process may use is not known
    if cfg.memory_limit or job.runtime.device.type == "cuda":
        memory, _ = memory_of(cfg, job.runtime)
        job.runtime.broadcast_from_rank0("state", lambda: check_state(cfg, job, memory))


def check_state(cfg: Config, job: Job, memory: int) -> None:
    """As `check_memory`, on one rank, for devices with `memory` bytes."""
    copies_of_state = state_copies(job.recipe.optimizer, job.model.parameters())
    copies = 2 + copies_of_state + (job.recipe.ema is not None)
    if copies * sum(parameter.nbytes for parameter in job.model.parameters()) <= memory:
        return
    advisor = advisor_of(cfg, job.dataset, job.model, job.runtime, memory)
    try:
        needed, rank = max(
            (sum(plan.state_bytes.values()), plan.rank) for plan in advisor.plan([]).plans
        )
    except RuntimeError:  # CannotPlan
        return
    if needed > memory:
        raise ConfigError(
            f"strategy={job.strategy.name}: parameters, gradients and optimizer state take "
            f"{size(needed)} on rank {rank}, a device has {size(memory)}, and activations need "
            f"more. {alternatives(advisor, job.runtime)}"
        )


def choose_batch(cfg: Config, runtime: Runtime, resumed: Path | None = None) -> str:
    """Replace batch_size=auto or accumulate=auto by a number; return a line about it for the log.

    Collective.

    Rank 0 plans; then all ranks take a real step in processes of their own, which may run out of
    memory.

    Args:
        cfg: is changed.
        runtime: the ranks.
        resumed: directory of the run that is resumed. Its batch is kept, on fewer devices with more
            steps of accumulation.

    Raises:
        ConfigError: not even the smallest batch fits, or the step cannot be planned.
    """
    auto = [key for key in ("batch_size", "accumulate") if cfg[key] == "auto"]
    if not auto:
        return ""
    key = auto[0]
    steps = 0  # of accumulation in the run that is resumed
    if resumed:
        batch_size, steps = runtime.broadcast_from_rank0("batch before", partial(recorded, resumed))
        cfg.batch_size = batch_size if "batch_size" in auto else cfg.batch_size
        key = "accumulate"
    elif len(auto) > 1:
        raise ConfigError(
            "accumulate=auto: needs a fixed global batch; use a number for batch_size, or leave "
            "accumulate out"
        )

    cfg[key] = "auto"
    _, memory = memory_of(cfg, runtime)
    strategy = construct("strategy", cfg.strategy, runtime)
    dataset = load_dataset(cfg, runtime)
    values = values_of(cfg, strategy, min(dataset.train.size, LARGEST), steps or 1)
    taken = 0
    problem = ""
    spare = LIBRARIES * (runtime.device.type == "cpu")
    for share in PLANNED:
        cfg[key] = "auto"
        budget = max(0, int(share * memory - spare))
        cfg[key] = runtime.broadcast_from_rank0(
            "batch", partial(largest, cfg, dataset, runtime, values, budget)
        )
        if cfg.accumulate == steps:
            return (
                f"batch_size={cfg.batch_size}, accumulate={cfg.accumulate}: those of the run that "
                "is resumed"
            )

        taken, problem = take_real_step(cfg, runtime)
        if not problem and taken <= TAKEN * memory:
            text = (
                f"{key}=auto: {cfg[key]}. A real step took {size(taken)} of the {size(memory)} of "
                "a device"
            )
            return f"{text}; batch_size={cfg.batch_size}, lr_scaling={cfg.lr_scaling}"

    reason = problem or f"takes {size(taken)} of {size(memory)}"
    raise ConfigError(
        f"{key}=auto: a real step with {key}={cfg[key]} does not fit: {reason}. Use a number"
    )


def recorded(run: Path) -> list[int]:
    """Return batch_size and accumulate in the config of a run."""
    cfg = load_yaml(run / "config.yaml")
    return [cfg.batch_size, cfg.accumulate]


def values_of(cfg: Config, strategy: Strategy, samples: int, first: int) -> list[int]:
    """Return the values that the key that is auto may have; those that need the most memory first.

    A batch is at most the training set, and within 3 % of any other size. All steps of accumulation
    are equal.

    Args:
        cfg: the config.
        strategy: decides how many replicas share a batch, and into how many micro-batches they
            divide it.
        samples: size of the training set.
        first: the smallest value of accumulate.
    """
    shared = strategy.replicas if cfg.scaling == "strong" else 1
    if cfg.accumulate == "auto":
        local_batch = cfg.batch_size // shared
        most = max(first, local_batch // strategy.num_microbatches)
        return [n for n in range(first, most + 1) if local_batch % n == 0] or [first]
    finest = shared * strategy.num_microbatches * cfg.accumulate
    unit = math.lcm(MULTIPLE * shared, finest)
    limit = samples * shared // strategy.replicas
    most = limit // unit
    sizes = [unit * n for n in range(most, 0, -1) if n % 2 ** max(0, n.bit_length() - 6) == 0]
    below = min(unit // finest - 1, limit // finest)
    sizes += [finest * n for n in range(below, 0, -1)]
    return sizes or [finest]


def largest(cfg: Config, dataset: Dataset, runtime: Runtime, values: list[int], budget: int) -> int:
    """Return the first value with which the plan fits the budget, in bytes.

    The other arguments are as in `choose_batch`.

    Raises:
        ConfigError: none fits, or the step cannot be planned.
    """
    key = "accumulate" if cfg.accumulate == "auto" else "batch_size"
    cfg = changed(cfg, {key: values[-1]})
    from ddp_lab.advise.plan import model_to_plan

    trial = make_trial(dataset, make_task(cfg, dataset))
    model = model_to_plan(cfg.model, dataset.model_shape(), cfg.precision, cfg.seed, trial)
    advisor = advisor_of(cfg, dataset, model, runtime, budget)

    def needed(value: int) -> float:
        return replace(advisor, cfg=changed(cfg, {key: value})).plan([]).fullest.total

    try:
        place = bisect_left(values, True, key=lambda value: needed(value) <= budget)
        if place < len(values):
            return values[place]
        least = size(round(needed(values[-1])))
    except RuntimeError as error:  # CannotPlan
        raise ConfigError(f"{key}=auto: cannot be planned: {error}. Use a number") from None

    raise ConfigError(
        f"{key}=auto: not even {values[-1]} fits: it needs {least} of a device, of which "
        f"{size(budget)} may be used. {alternatives(advisor, runtime)}"
    )


def take_real_step(cfg: Config, runtime: Runtime) -> tuple[int, str]:
    """Take a real step on all ranks; return the most bytes of a device, and an error or "".

    Collective.
    """
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = int(runtime.broadcast_from_rank0("port", lambda: listener.getsockname()[1]))
    taken = 0
    problem = ""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            taken = pool.submit(real_step, with_references(cfg), port).result()
        except Exception as error:  # out of memory, or the process was killed
            problem = describe_error(error)

    taken, problem = runtime.gather_and_decide(
        "real step",
        [taken, problem],
        lambda by_rank: [max(each) for each in zip(*by_rank, strict=True)],
    )
    return taken, problem


def real_step(config: dict[str, Any], port: int) -> int:
    """Take two real steps in this process, and return the bytes of its device in use.

    The process is a rank like the one that started it.
    """
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    cfg = as_config(config)
    with Runtime(cfg.device, cfg.precision, STEP_TIMEOUT) as runtime:
        before = bytes_in_use(runtime)
        job = build_job(cfg, runtime, with_weights=False)
        with job.options.backend_flags(runtime):
            trainer = job.trainer()
            job.loaders["train"].set_epoch(1)
            job.strategy.train()
            batch = next(iter(job.loaders["train"]))
            for _ in range(2):
                trainer.eager_step(batch)
            return bytes_in_use(runtime) - before


def bytes_in_use(runtime: Runtime) -> int:
    """Return the bytes of the GPU that are in use, torch's cache included.

    Of a CPU rank, return the most that this process has had.
    """
    if runtime.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(runtime.device)
        return total - free
    return peak_memory_bytes()
