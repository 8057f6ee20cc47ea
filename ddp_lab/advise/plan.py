"""The plan of a rank: the job that train.py would make takes real steps, on fake tensors, which have shapes and no memory.

The strategy, the optimizer and the step are those of the run, whatever the model and the strategy. Two steps are taken: the
first creates the optimizer's state, and at the peak of the second it is recorded what lives then.
"""

import logging
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn

from ddp_lab.advise.live import Collective, Live, key_of
from ddp_lab.advise.planned import PlannedRuntime
from ddp_lab.config.build import build, for_cpu
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.data.batch import Batch
from ddp_lab.data.dataset import Dataset
from ddp_lab.models.make import BuiltModel
from ddp_lab.models.trial import meta_copy
from ddp_lab.run.job import Job, arrange, check_optimizer, make_plan
from ddp_lab.run.materialize import Training, materialize
from ddp_lab.run.speed import bytes_of
from ddp_lab.speed.fused import configure_optimizer
from ddp_lab.speed.options import AUTO
from ddp_lab.strategies.sharding import ShapesOnly, local

# What torch does not count as allocated, or allocates for a library: two H200s, torch 2.11, 2026-11-23.
CONTEXT = 0.68 * 2**30  # CUDA context and loaded kernels
COMMUNICATOR = 0.82 * 2**30  # NCCL's buffers, for each group of ranks
WORKSPACE = 32 * 2**20  # cuBLAS, for each of the two threads that compute
STATE = ("parameters", "gradients", "optimizer", "averages")  # what strategy.offload keeps on the host
HELD = (*STATE, "buffers")
HOST = -1  # the place of what is in host memory


class Planned(NamedTuple):
    """What a device of a rank holds, needs, sends and computes. All sizes are bytes.

    Attributes:
        rank, place: the rank, and which of its devices.
        held: parameters, gradients, optimizer, averages and buffers: exactly what the rank holds after a backward pass.
        peak: the parts of the memory at the peak of a step. Without `outside` it is what torch counts as allocated.
        outside: what torch does not count.
        host: what the rank keeps in host memory.
        calls, sent: number of calls, and bytes that the rank sends, by collective of a step.
        flops: of a step.
    """

    rank: int
    place: int
    held: dict[str, int]
    peak: dict[str, float]
    outside: float
    host: int
    calls: dict[Collective, int]
    sent: dict[Collective, int]
    flops: int

    @property
    def allocated(self) -> float:
        return sum(self.peak.values())

    @property
    def total(self) -> float:
        return self.allocated + self.outside


class CannotPlan(RuntimeError):
    """A step cannot be taken without values."""


def plan_rank(cfg: DictConfig, dataset: Dataset, model: nn.Module, runtime: PlannedRuntime) -> list[Planned]:
    """Return the plan of each device of a rank: of one, unless the strategy drives several.

    Args:
        cfg: a config of train.py, checked.
        dataset: of which the sizes are enough.
        model: the complete model, on any device; it is copied without its weights.
        runtime: which rank of which launch.

    Raises:
        ConfigError: the strategy cannot be laid out, or the model or the batch cannot be divided.
        CannotPlan: the model reads values in its forward pass, or an operation fails on fake tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # loads 300 modules

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    strategy = build(cfg.strategy, runtime)
    built = BuiltModel(meta_copy(model), cast("Any", ShapesOnly(fake)), [])  # a copy, because the strategy changes its model
    job = arrange(cfg, strategy, dataset, make_plan(cfg, strategy, dataset), built)
    check_optimizer(cfg, strategy)
    with silent(), torch.random.fork_rng(devices=[]):
        try:
            return take_steps(begin(job), runtime, fake)
        except ConfigError:
            raise
        except Exception as error:
            raise CannotPlan(f"a step on tensors without values failed: {describe_error(error)}") from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
                forget_meshes()


def forget_meshes() -> None:
    """Clear what DTensor remembers of layouts: it refers to the groups of the plan, and the next mesh of this size is equal."""
    from torch.distributed.tensor import _redistribute, debug  # there is no public function

    debug._clear_sharding_prop_cache()  # pyright: ignore[reportPrivateUsage]
    _redistribute._gen_transform_infos.cache_clear()  # pyright: ignore[reportPrivateUsage]


def begin(job: Job) -> Training:
    """Return the training of a planned job, on fake tensors of the CPU."""
    strategy: Any = job.strategy
    kind, cpu = torch.device(strategy.runtime.kind), torch.device("cpu")
    strategy.runtime.device = strategy.device = cpu
    if hasattr(strategy, "devices"):
        strategy.devices = [cpu] * len(strategy.devices)
    training = materialize(job)
    optimizer = configure_optimizer(training.optimizer, job.options, kind)
    for group in for_cpu(optimizer).param_groups:
        if kind.type == "cuda" and group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True  # the default on GPUs: all parameters in one call
    return training


def take_steps(training: Training, runtime: PlannedRuntime, fake: AbstractContextManager[Any]) -> list[Planned]:
    """Take the steps and return what they needed. The arguments are those of `plan_rank`."""
    job, live = training.job, Live()
    state = State(training, live)
    parts: dict[int, dict[str, float]] = {}
    with fake, live:
        batch = batch_of(job)
        live.track(state.all())
        job.strategy.train()
        training.step(batch)
        state.settle()
        moments: dict[int, Moment] = {}
        live.at_peak = lambda place: moments.update({place: state.moment(place)})
        live.restart()
        training.step(batch)
        for place in range(state.places):
            live.note(place)
            parts[place] = state.parts(place, moments[place], batch)
    devices: list[Planned] = []
    for place in range(state.places):
        held, on_gpu = state.held(place), runtime.kind == "cuda"
        groups = {collective.ranks for collective in live.calls}
        outside = on_gpu * (CONTEXT + COMMUNICATOR * len(groups))
        parts[place]["copies"] = copies_of(job, held)
        if on_gpu:
            parts[place]["data"] += bytes_of(job.dataset) or 0 if job.options.loader == "device" else 0
            parts[place]["workspaces"] = 2 * WORKSPACE * live.multiplies
        host = sum(held[name] for name in STATE) if state.on_host else 0
        devices.append(
            Planned(runtime.rank, place, held, parts[place], outside, host, live.calls, live.sent, live.flops[place])
        )
    return devices


class Moment(NamedTuple):
    """What lives at a moment: the place and size of each storage, and which of them are gradients, or sent or gathered."""

    sizes: dict[int, tuple[int, int]]
    gradients: set[int]
    in_flight: set[int]


class State:
    """The tensors of a training that live between its steps, and where they are counted.

    Args:
        training: of a planned job.
        live: what counts them.

    Attributes:
        places: number of devices of the rank.
        on_host: whether parameters, gradients, optimizer and averages are in host memory.
        gradients: their bytes by place, noted when the optimizer's step begins.
    """

    def __init__(self, training: Training, live: Live):
        self.training, self.live, self.strategy = training, live, training.job.strategy
        self.modules = self.strategy.modules_by_device
        self.places = len(self.modules)
        self.on_host = bool(getattr(self.strategy, "offload", False))
        self.gradients: list[int] = []
        self.owned = [list(module.parameters()) for module in self.modules]
        training.optimizer.register_step_pre_hook(lambda *_: self._begin_update())
        training.optimizer.register_step_post_hook(lambda *_: setattr(live, "place", 0))
        if self.on_host:
            live.after_collective = self.settle
        if self.places > 1:
            self._follow()

    def tensors(self, place: int) -> dict[str, list[torch.Tensor]]:
        """Return what a device holds by kind; of a sharded model the shards."""
        owned, training = self.owned[place], self.training
        buffers = list(self.modules[place].buffers())
        names = {id(tensor) for tensor in [*owned, *buffers]}
        averages = training.ema
        return {
            "parameters": [*owned],
            "gradients": [parameter.grad for parameter in owned if parameter.grad is not None],
            "optimizer": [
                value
                for parameter in owned
                for value in training.optimizer.state.get(parameter, {}).values()
                if isinstance(value, torch.Tensor)
            ],
            "averages": [averages.averages[name] for name, own in averages.tensors.items() if id(own) in names]
            if averages
            else [],
            "buffers": buffers,
        }

    def held(self, place: int) -> dict[str, int]:
        """Return the bytes that a device holds by kind, when the optimizer's step begins."""
        return {kind: nbytes(tensors) for kind, tensors in self.tensors(place).items()} | {"gradients": self.gradients[place]}

    def all(self) -> list[torch.Tensor]:
        """Return all tensors."""
        return [tensor for place in range(self.places) for kind in self.tensors(place).values() for tensor in kind]

    def settle(self) -> None:
        """Count the tensors where they are: on the host, or on the device of their part of the model."""
        for place in range(self.places):
            for kind, tensors in self.tensors(place).items():
                self.live.move(tensors, HOST if self.on_host and kind in STATE else place)

    def moment(self, place: int) -> "Moment":
        """Return what lives now. It is called at each new peak, so it only makes copies."""
        now = list(self.modules[place].parameters())  # of a sharded model, those that are gathered now
        gradients = [parameter.grad for parameter in (*self.owned[place], *now) if parameter.grad is not None]
        return Moment(dict(self.live.sizes), {*map(key_of, gradients)}, self.live.in_flight | {*map(key_of, now)})

    def parts(self, place: int, moment: "Moment", batch: Batch) -> dict[str, float]:
        """Return the bytes at a place by kind.

        Args:
            place: which device.
            moment: when.
            batch: the local batch.
        """
        kinds = dict.fromkeys(moment.in_flight, "in flight") | dict.fromkeys(moment.gradients, "gradients")
        kinds |= {key_of(tensor): kind for kind, tensors in self.tensors(place).items() for tensor in tensors}
        kinds |= {key_of(tensor): "data" for tensor in batch[:2]}
        found: dict[str, float] = dict.fromkeys((*HELD, "activations", "in flight", "data"), 0.0)
        for key, (owner, size) in moment.sizes.items():
            if owner == place:
                found[kinds.get(key, "activations")] += size
        return found

    def _begin_update(self) -> None:
        self.gradients = [nbytes(self.tensors(place)["gradients"]) for place in range(self.places)]
        self.settle()
        self.live.place = HOST if self.on_host else 0

    def _follow(self) -> None:
        """Let what a part of the model computes be counted on its device."""
        live = self.live
        for place, module in enumerate(self.modules):

            def enter(module: nn.Module, inputs: tuple[torch.Tensor], place: int = place) -> tuple[torch.Tensor]:
                live.place = place
                return (inputs[0].clone(),) if place else inputs  # the copy that the device receives

            def leave(module: nn.Module, inputs: object, output: torch.Tensor, place: int = place) -> None:
                if output.grad_fn is not None:
                    output.grad_fn.register_prehook(lambda gradients: setattr(live, "place", place))

            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors; of DTensors those of the local shards."""
    return sum(local(tensor).nbytes for tensor in tensors)


def copies_of(job: Job, held: dict[str, int]) -> int:
    """Return the bytes of what a warm-up restores: of the optimizer's state only in a second one, as the first creates it."""
    options = job.options
    twice = options.cuda_graph or options.compile == AUTO  # to capture, or to time the step
    if not (twice or options.compile):
        return 0
    return held["parameters"] + held["buffers"] + held["averages"] + twice * held["optimizer"]


@contextmanager
def silent() -> Generator[None]:
    """Discard log messages: those of a run that is only planned, and errors of fake tensors, which are raised as well."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def batch_of(job: Job) -> Batch:
    """Return a local batch. Call it within the fake mode."""
    size = job.plan.samples_at_once * job.recipe.accumulate
    images = torch.empty(size, *job.dataset.train.shape)
    if job.options.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    return Batch(images, torch.zeros(size, dtype=torch.int64), job.plan.global_batch_size)
