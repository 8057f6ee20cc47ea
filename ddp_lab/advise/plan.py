"""The plan of a rank: real steps of train.py's job on fake tensors.

Fake tensors have shapes and no memory.

The strategy, the optimizer and the step are those of the run, whatever the model and the strategy.
Two steps are taken: the first creates the optimizer's state, and at the peak of the second it is
recorded what lives then. For the picture of a pipeline `time_slots` says when each rank computes
which micro-batch.
"""

import logging
import math
import re
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.advise.fake import FakeDDP, FakeWeights
from ddp_lab.advise.live import STATE, Collective, Live
from ddp_lab.config.build import Config, construct, for_cpu, plain
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.data.dataset import Dataset, InMemory, hold_out
from ddp_lab.models.chain import Chain
from ddp_lab.models.make import BuiltModel, build_model, make_model
from ddp_lab.models.trial import Trial, freeze_unused, meta_copy
from ddp_lab.run.build import assemble, make_sizes, make_task, model_spec
from ddp_lab.run.build_data import make_source
from ddp_lab.run.job import Job
from ddp_lab.run.speed import bytes_of
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.dtensor import forget_layouts
from ddp_lab.training.optimizer import configure_optimizer
from ddp_lab.training.performance import AUTO
from ddp_lab.world.planned import PlannedRuntime

# What torch does not count as allocated, or allocates for a library: two H200s, torch 2.11,
# 2026-11-23.
CONTEXT = 0.68 * 2**30  # CUDA context and loaded kernels
COMMUNICATOR = 0.82 * 2**30  # NCCL's buffers, for each group of ranks
WORKSPACE = 32 * 2**20  # cuBLAS, for each of the two threads that compute


class DeviceEstimate(NamedTuple):
    """What a device of a rank holds, needs, sends and computes. All sizes are bytes.

    Attributes:
        rank, place: the rank, and which of its devices.
        state_bytes: of parameters, gradients, optimizer, averages and buffers: exactly what the
            rank holds after a backward pass.
        peak: the parts of the memory at the peak of a step. Without `outside` it is what torch
            counts as allocated.
        outside: what torch does not count.
        calls, sent: number of calls, and bytes that the rank sends, by collective of a step.
        flops: of a step.
        order: start, length, kind and micro-batch of each pass in its pipeline, by rank; empty for
            other strategies.
    """

    rank: int
    place: int
    state_bytes: dict[str, int]
    peak: dict[str, float]
    outside: float
    calls: dict[Collective, int]
    sent: dict[Collective, int]
    flops: int
    order: dict[int, list[tuple[int, int, str, int]]]

    @property
    def allocated(self) -> float:
        return sum(self.peak.values())

    @property
    def total(self) -> float:
        return self.allocated + self.outside


class CannotPlan(RuntimeError):
    """A step cannot be taken without values."""


def ranks_to_plan(strategy: Strategy) -> list[int]:
    """Return the ranks to plan: one of each stage of a pipeline, else rank 0.

    Rank 0 has the largest shards.
    """
    names = list(strategy.axes)
    sizes = list(strategy.axes.values())
    if strategy.one_process or "pp" not in names:
        return [0]
    place = names.index("pp")
    return [stage * math.prod(sizes[place + 1 :]) for stage in range(sizes[place])]


def dataset_sizes(data: Config) -> Dataset | None:
    """Return a dataset of which only the sizes are known.

    It is on the meta device, and needs neither a download nor memory.

    Args:
        data: the config group `data`.

    Returns:
        None if the dataset must be read to know its sizes: its source has no attributes sizes,
        shape and num_classes.
    """
    source: Any = make_source(plain(data), seed=0)
    if not hasattr(source, "sizes"):
        return None
    with torch.device("meta"):
        images = [torch.empty(size, *source.shape, dtype=torch.uint8) for size in source.sizes]
        train, test = (
            InMemory(inputs, torch.empty(len(inputs), dtype=torch.int64)) for inputs in images
        )
    classes = [str(label) for label in range(source.num_classes)]
    return hold_out(Dataset(train, test, classes), data["val_fraction"], data["val_seed"])


def model_to_plan(
    node: Config | dict[str, Any], shape: Mapping[str, Any], precision: str, seed: int, trial: Trial
) -> nn.Module:
    """Return the model of a planned run, on the meta device.

    If its constructor or its forward pass needs values, it is on the CPU.

    Args:
        node: the config group `model`.
        shape: the arguments that follow from the data (`Dataset.model_shape`).
        precision, seed: of the run.
        trial: what the model is tried with.

    Raises:
        ConfigError: the model cannot be constructed, or does not accept the images.
    """
    runtime = PlannedRuntime(1, 1, precision, kind="cpu")
    spec = model_spec(node, shape)
    try:
        with torch.device("meta"):
            model = build_model(spec, trial.inputs)
        if (
            not spec.target.startswith("ddp_lab.models.")
            or not isinstance(model, Chain)
            or trial.of_all
        ):
            freeze_unused(model, trial, runtime, spec.key)
    except ConfigError:
        return make_model(spec, runtime, seed, trial, with_weights=False).model
    return model


def plan_rank(
    cfg: Config, dataset: Dataset, model: nn.Module, runtime: PlannedRuntime
) -> list[DeviceEstimate]:
    """Return the plan of each device of a rank: of one, unless the strategy drives several.

    Args:
        cfg: a config of train.py, checked.
        dataset: of which the sizes are enough.
        model: the complete model, on any device; it is copied without its weights.
        runtime: of the rank.

    Raises:
        ConfigError: the strategy cannot be laid out, or the model or the batch cannot be divided.
        CannotPlan: the model reads values in its forward pass, or an operation fails on fake
            tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # loads 300 modules

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    strategy: Any = construct("strategy", cfg.strategy, runtime)
    if strategy.cuts_model and not isinstance(model, Chain):
        raise CannotPlan("the stages of a model that is no Chain are traces, which are not planned")
    strategy.replace_wrapper(FakeDDP)
    # a copy, because the strategy changes it
    built = BuiltModel(meta_copy(model), FakeWeights(fake), [])
    job = assemble(
        cfg, strategy, dataset, make_sizes(cfg, strategy, dataset), built, make_task(cfg, dataset)
    )

    if strategy.name == "dp":
        raise CannotPlan(
            "nn.DataParallel copies the model to every GPU in every step; use strategy=ddp"
        )

    runtime.device = torch.device("cpu")
    strategy.use_device(runtime.device)
    logs = logging.root.manager.disable  # errors of fake tensors are logged, and raised as well
    logging.disable(logging.CRITICAL)
    try:
        with torch.random.fork_rng(devices=[]):
            trainer = job.trainer()
            device = torch.device(runtime.kind)
            how = job.options
            optimizer = configure_optimizer(
                trainer.optimizer,
                device,
                how.fused,
                how.cuda_graph,
                how.compile is True,
                skips=trainer.strategy.loss_scale is not None,
            )
            for group in for_cpu(optimizer).param_groups:
                if (
                    runtime.kind == "cuda"
                    and group.get("foreach", True) is None
                    and not group.get("fused")
                ):
                    group["foreach"] = True  # the default on GPUs: all parameters in one call

            live = Live(job, trainer)
            with fake, live:
                live.take_steps()
            return [
                estimate_device(job, runtime, live, place) for place in range(len(live.modules))
            ]
    except ConfigError:
        raise
    except Exception as error:
        raise CannotPlan(
            f"a step on tensors without values failed: {describe_error(error)}"
        ) from error
    finally:
        logging.disable(logs)
        if dist.is_initialized():
            dist.destroy_process_group()
            forget_layouts()


def estimate_device(job: Job, runtime: PlannedRuntime, live: Live, place: int) -> DeviceEstimate:
    """Return the plan of a device after the steps."""
    state_bytes = live.state_bytes[place]
    peak = live.peak(place)
    options = job.options
    # A warm-up restores what it changed: of the optimizer's state only a second one, as the first
    # one creates it.
    again = options.cuda_graph or options.compile == AUTO  # to capture, or to time the step
    if again:
        copied = {*STATE} - {"gradients"}
    elif options.compile:
        copied = {"parameters", "buffers", "averages"}
    else:
        copied = set[str]()

    peak["copies"] = sum(state_bytes[kind] for kind in copied)
    outside = 0.0
    if runtime.kind == "cuda":
        peak["data"] += (job.options.loader == "device") * (bytes_of(job.dataset) or 0)
        peak["workspaces"] = 2 * WORKSPACE * bool(live.flops[place])
        outside = CONTEXT + COMMUNICATOR * len({collective.ranks for collective in live.calls})

    executor = getattr(job.strategy, "executor", None)
    slots = time_slots(executor.order) if executor else {}
    return DeviceEstimate(
        rank=runtime.rank,
        place=place,
        state_bytes=state_bytes,
        peak=peak,
        outside=outside,
        calls=live.calls,
        sent=live.sent,
        flops=live.flops[place],
        order=slots,
    )


def time_slots(order: dict[int, list[str]]) -> dict[int, list[tuple[int, int, str, int]]]:
    """Return start, length, kind and micro-batch of each pass by rank.

    Each pass begins when its rank and its input are ready.

    Args:
        order: the actions of each rank by torch's names: "1F0" is the forward pass of stage 1 and
            micro-batch 0; B is a backward pass, which takes two slots, and I and W are its halves.
            A stage takes its micro-batches in ascending order. They are counted, because torch 2.15
            numbers some of 1f1b wrongly.
    """
    passes = {
        rank: [re.fullmatch(r"(\d+)([FBIW])\d+", action) for action in actions]
        for rank, actions in order.items()
    }
    left = {
        rank: deque((int(cell[1]), cell[2]) for cell in row if cell) for rank, row in passes.items()
    }
    last = max(stage for row in left.values() for stage, _ in row)
    slots: dict[int, list[tuple[int, int, str, int]]] = {rank: [] for rank in order}

    ends = dict[tuple[str, int, int], int]()
    counts = Counter[tuple[int, str]]()
    while any(left.values()):
        for rank, row in left.items():
            while row:
                stage, kind = row[0]
                number = counts[stage, kind]
                needs = {"F": ("F", stage - 1), "W": ("B", stage)}.get(
                    kind, ("B", stage + 1) if stage < last else ("F", stage)
                )
                ready = 0 if needs == ("F", -1) else ends.get((*needs, number))
                if ready is None:
                    break
                start = max([ready, *(begin + size for begin, size, _, _ in slots[rank][-1:])])
                length = 1 + (kind == "B")
                slots[rank].append((start, length, kind, number))
                ends["B" if kind == "I" else kind, stage, number] = start + length
                counts[stage, kind] += 1
                row.popleft()
    return slots
