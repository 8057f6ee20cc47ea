"""What the steps of a training compute, recorded without another loop than that of a run."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.checkpoints.state import gather_full_state
from ddp_lab.config.types import Every
from ddp_lab.data.batch import Batch, apply
from ddp_lab.data.loader import Loader
from ddp_lab.observe.logger import Logger
from ddp_lab.proof.numbers import relative_difference
from ddp_lab.resilience.replicas import checksum, first_difference
from ddp_lab.strategies.base import Strategy, total
from ddp_lab.strategies.dtensor import local
from ddp_lab.training.hooks import Run
from ddp_lab.training.loop import train_epoch
from ddp_lab.training.plan import FitSettings
from ddp_lab.training.progress import Progress
from ddp_lab.training.step import Step
from ddp_lab.training.sync import Sync

Tensors = dict[str, Tensor]


class OtherTensor(NamedTuple):
    """A tensor that is not the same on all replicas.

    Attributes:
        name: of the tensor.
        replica: the first one whose tensor is not that of replica 0.
        relative: the largest difference of an element, divided by the largest of replica 0.
    """

    name: str
    replica: int
    relative: float


@dataclass
class Recording:
    """What a training has computed, of the complete model; without tensors on ranks but rank 0.

    Attributes:
        replicas: copies of the model that share a global batch.
        initial: the weights before the first step.
        sizes: samples of the GLOBAL batch of each step.
        losses: of each step.
        gradients: of each step, before they are clipped.
        clipped: of each step, as the optimizer gets them; empty if the run does not clip.
        norms: L2 norm of the gradients of each step; empty if the run does not clip.
        weights: and buffers after the last step.
        dropout: names of the probabilities that were set to 0.
        other_gradient: the first gradient of step 1 that is not the same on all replicas; None: all
            are.
        summed: gradients of step 1, summed over replicas that have different ones; else empty.
        drifted: the first weight that is not the same on all replicas at the end; None: all are.
    """

    replicas: int
    initial: Tensors = field(default_factory=Tensors)
    sizes: list[int] = field(default_factory=list[int])
    losses: list[Tensor] = field(default_factory=list[Tensor])
    gradients: list[Tensors] = field(default_factory=list[Tensors])
    clipped: list[Tensors] = field(default_factory=list[Tensors])
    norms: list[float] = field(default_factory=list[float])
    weights: Tensors = field(default_factory=Tensors)
    dropout: list[str] = field(default_factory=list[str])
    other_gradient: OtherTensor | None = None
    summed: Tensors = field(default_factory=Tensors)
    drifted: OtherTensor | None = None

    def in_dtype(self, dtype: torch.dtype) -> "Recording":
        """Return the recording with its floating-point tensors rounded to a dtype."""

        def rounded(tensors: Tensors) -> Tensors:
            return {
                name: tensor.to(dtype) if tensor.is_floating_point() else tensor
                for name, tensor in tensors.items()
            }

        return replace(
            self,
            initial=rounded(self.initial),
            losses=[loss.to(dtype) for loss in self.losses],
            gradients=[rounded(each) for each in self.gradients],
            clipped=[rounded(each) for each in self.clipped],
            summed=rounded(self.summed),
            weights=rounded(self.weights),
        )

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype of the first parameter that is a floating-point number."""
        dtypes = [tensor.dtype for tensor in self.initial.values() if tensor.is_floating_point()]
        return dtypes[0] if dtypes else torch.get_default_dtype()


class RecordedStep(Step):
    """The training step of a run, which also records what it computes.

    Args:
        step: the step, with its strategy and optimizer.
        reverses: whether the samples of each micro-batch are computed in reverse order, with which
            sums round differently.
    """

    def __init__(self, step: Step, reverses: bool = False):
        super().__init__(step.strategy, step.optimizer, step.scheduler, step.options, step.ema)
        self.reverses = reverses
        self.recording = Recording(step.strategy.replicas, initial=full_weights(step.strategy))
        optimize = self._optimize

        def record_and_optimize() -> None:
            if self.running_sums.norm is not None:
                self.recording.norms.append(float(self.running_sums.norm))
                self.recording.clipped.append(full_gradients(self.strategy))
            optimize()

        self._optimize = record_and_optimize

    def mixed(self, batch: Batch) -> Batch:
        """Return the batch to train on, also in reverse order."""
        mixed = super().mixed(batch)
        if not self.reverses:
            return mixed
        reverse = reverse_within(self.options.accumulate)
        targets = None if mixed.targets is None else apply(reverse, mixed.targets)
        return mixed._replace(inputs=apply(reverse, mixed.inputs), targets=targets)

    def backward(self, batch: Batch) -> Tensor:
        """Compute the gradients as a step does, and record them."""
        sums = super().backward(batch)
        loss, *_, weight = total(self.strategy, sums)
        self.recording.sizes.append(batch.global_size)
        self.recording.losses.append(torch.where(weight == 0, 0, loss / weight).cpu())
        if not self.recording.gradients:
            self._compare_replicas()
        self.recording.gradients.append(full_gradients(self.strategy))
        return sums

    def _compare_replicas(self) -> None:
        """Record which gradient differs between replicas. Collective."""
        strategy = self.strategy
        differing = None
        if strategy.dp_size > 1 and not strategy.sharded:
            differing = first_other_gradient(strategy)
        self.recording.other_gradient = on_all_ranks(strategy, differing)
        if self.recording.other_gradient is not None:
            self.recording.summed = summed_gradients(strategy)

    def end(self) -> Recording:
        """Record the weights after the last step. Collective."""
        self.recording.weights = full_weights(self.strategy)
        self.recording.drifted = on_all_ranks(self.strategy, first_drifted(self.strategy))
        return self.recording


def record(step: Step, loader: Loader, reverses: bool) -> Recording:
    """Train for an epoch by the loop of a run, and return what its steps have computed. Collective.

    Args:
        step: in eager mode.
        loader: of the training set.
        reverses: as for `RecordedStep`.
    """
    recorded = RecordedStep(step, reverses)
    run = Run(
        eager=recorded,
        step=recorded,
        loaders={"train": loader},
        settings=FitSettings(1),
        logger=Logger(),
        hooks=[],
        sync=Sync(step.strategy, recorded.running_sums, Every()),
        position=Progress(),
    )
    run.sync.begin(run.position)
    train_epoch(run)
    return recorded.end()


def reverse_within(micro_batches: int) -> Callable[[Tensor], Tensor]:
    """Return what reverses the rows of each of some micro-batches of a tensor, [b, ...]."""

    def reverse(tensor: Tensor) -> Tensor:
        rows = torch.arange(len(tensor)).chunk(micro_batches)
        return tensor[torch.cat([part.flip(0) for part in rows])]

    return reverse


def full_weights(strategy: Strategy) -> Tensors:
    """Return the weights and buffers of the complete model on rank 0, else {}. Collective."""
    return gather_full_state(strategy, strategy.module.state_dict())[0]


def full_gradients(strategy: Strategy) -> Tensors:
    """Return the gradients of the complete model on rank 0, else {}. Collective.

    Parameters that the step has not used have none.
    """
    gradients = {
        name: parameter.grad
        for name, parameter in strategy.module.named_parameters()
        if parameter.grad is not None
    }
    return gather_full_state(strategy, gradients)[0]


def first_other_gradient(strategy: Strategy) -> OtherTensor | None:
    """Return the first parameter whose gradient differs between replicas. Collective."""
    gradients = {
        name: parameter.grad
        for name, parameter in strategy.module.named_parameters()
        if parameter.grad is not None
    }
    if not gradients:
        return None
    checksums = torch.stack([checksum(gradient) for gradient in gradients.values()])
    by_replica = gathered(strategy, checksums)
    differing = (torch.stack(by_replica) != by_replica[0]).nonzero().tolist()
    if not differing:
        return None
    number, replica = min((parameter, replica) for replica, parameter in differing)
    name = list(gradients)[number]
    return other_tensor(strategy, name, gradients[name], replica)


def first_drifted(strategy: Strategy) -> OtherTensor | None:
    """Return the first weight that differs between replicas. Collective."""
    drifted = first_difference(strategy, {})
    if drifted is None:
        return None
    name, replica = drifted
    tensors = dict(strategy.module.named_parameters()) | dict(strategy.module.named_buffers())
    return other_tensor(strategy, name, tensors[name], replica)


def other_tensor(strategy: Strategy, name: str, tensor: Tensor, replica: int) -> OtherTensor:
    """Return how far the tensor of a replica is from that of replica 0. Collective."""
    by_replica = gathered(strategy, local(tensor).detach())
    return OtherTensor(name, replica, relative_difference(by_replica[0], by_replica[replica]))


def gathered(strategy: Strategy, tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all replicas. Collective."""
    by_replica = [torch.empty_like(tensor) for _ in range(strategy.dp_size)]
    dist.all_gather(by_replica, tensor.contiguous(), group=strategy.dp_group)
    return by_replica


def summed_gradients(strategy: Strategy) -> Tensors:
    """Return the sums of the replicas' gradients, of this rank's part of the model. Collective."""
    sums = Tensors()
    for name, parameter in strategy.module.named_parameters():
        if parameter.grad is not None:
            sums[name] = local(parameter.grad).detach().clone()
            dist.all_reduce(sums[name], group=strategy.dp_group)
    return sums


def on_all_ranks(strategy: Strategy, differing: OtherTensor | None) -> OtherTensor | None:
    """Return what the first rank that has noticed something has noticed, on all. Collective."""
    if strategy.runtime.world_size == 1 or not dist.is_initialized():
        return differing
    by_rank: list[OtherTensor | None] = [None] * strategy.runtime.world_size
    dist.all_gather_object(by_rank, differing)
    return next((each for each in by_rank if each is not None), None)


def without_dropout(model: nn.Module) -> list[str]:
    """Set the probability of dropout to 0 in all layers, because ranks draw different masks.

    Args:
        model: is changed.

    Returns:
        The names of the layers whose probability was not 0.
    """
    changed: list[str] = []
    for name, layer in model.named_modules():
        for key, value in list(vars(layer).items()):
            if is_probability(layer, key, value):
                setattr(layer, key, 0.0)
                changed.append(f"{name}.{key}".lstrip("."))
    return changed


def is_probability(layer: nn.Module, key: str, value: Any) -> bool:
    """Whether an attribute of a layer is the probability with which it drops something."""
    names = "drop" in key or (key == "p" and "Drop" in type(layer).__name__)
    is_rate = key == "rate" and bool(getattr(layer, "drops_by_step", False))
    return (names or is_rate) and type(value) is float and 0 < value < 1
