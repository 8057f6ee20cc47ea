"""The copies of gradients and parameters that a strategy makes to send them, and how many micro-batches it keeps."""

from dataclasses import dataclass, field

import torch
from torch import nn

from ddp_lab.models.chain import Chain
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.ddp import DDP
from ddp_lab.strategies.ddp_pipeline import DDPPipeline
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.pipeline import Pipeline
from ddp_lab.strategies.scratch import Scratch
from ddp_lab.strategies.share import Share
from ddp_lab.strategies.split import Split
from ddp_lab.strategies.tp import TP


@dataclass(frozen=True)
class Buckets:
    """The strategy's own copies of gradients and parameters on a rank, in bytes.

    Attributes:
        constant: in use during the whole step.
        at_end: when the gradients are summed after the backward pass.
        gathered: in use while a block computes, by its name.
        gradients_stay: whether the gradients keep their memory between two steps.
    """

    constant: float = 0
    at_end: float = 0
    gathered: dict[str, float] = field(default_factory=dict[str, float])
    gradients_stay: bool = False


def buckets_of(strategy: Strategy, share: Share, model: nn.Module, bf16: bool) -> Buckets:
    """Return the copies that a strategy makes.

    Args:
        strategy: after `partition`.
        share: what the rank holds.
        model: the complete model.
        bf16: whether the computation is in bf16.
    """
    trained = sum(share.nbytes(name, tensor) for name, tensor in model.named_parameters() if tensor.requires_grad)
    if isinstance(strategy, DDP):  # the gradients are copied into the buckets, or are views of them
        view = strategy.gradient_as_bucket_view
        return Buckets(constant=0 if view else trained, gradients_stay=view)
    if isinstance(strategy, DDPPipeline):
        return Buckets(constant=trained)
    if isinstance(strategy, Scratch):
        return Buckets(at_end=0 if strategy.algorithm in ("star", "per_tensor") else trained)
    if isinstance(strategy, TP):
        return Buckets(at_end=trained if strategy.dp_size > 1 else 0)
    if isinstance(strategy, FSDP | Mesh):
        return gathered(strategy, share, model, bf16)
    return Buckets()


def gathered(strategy: FSDP | Mesh, share: Share, model: nn.Module, bf16: bool) -> Buckets:
    """Return the gathered parameters: those of a block, and of the next one, which are gathered meanwhile.

    The gradients of the block before it are being summed, in float32, while a block's backward pass runs.
    """
    units = dict(model.named_children()) if isinstance(model, Chain) else {"": model}
    width = 2 if bf16 else 4
    elements = {
        unit: [
            (torch.Size(share.size(f"{unit}.{name}", tensor)).numel(), tensor.requires_grad)
            for name, tensor in block.named_parameters()
        ]
        for unit, block in units.items()
    }
    sizes = {unit: width * sum(size for size, _ in each) for unit, each in elements.items()}
    summed = {unit: 4 * sum(size for size, trained in each if trained) for unit, each in elements.items()}
    names = [name for name in units if share.has(name)]
    if not (strategy.reshard_after_forward if isinstance(strategy, FSDP) else strategy.axes["pp"] == 1):
        return Buckets(constant=sum(sizes[name] for name in names))
    return Buckets(
        gathered={
            name: sizes[name]
            + (sizes[names[place - 1]] if place else 0)
            + (summed[names[place + 1]] if place + 1 < len(names) else 0)
            for place, name in enumerate(names)
        }
    )


def micro_batches_kept(strategy: Strategy, place: int) -> float:
    """Return for how many micro-batches a rank keeps the activations of all its blocks.

    1f1b keeps those of at most p - place micro-batches; interleaved schedules keep more, because they have more stages to fill
    (Narayanan et al. 2021, arXiv:2104.04473, section 2.2, and torch's schedules); the others keep all m.

    Args:
        strategy: after `partition`.
        place: of the rank along pp.
    """
    if isinstance(strategy, Split):
        return strategy.num_microbatches
    if not isinstance(strategy, Pipeline) or strategy.axes["pp"] == 1:
        return 1
    p, m, name = strategy.axes["pp"], strategy.num_microbatches, strategy.schedule_name
    v = strategy.num_stages // p
    if name == "1f1b":
        return min(m, p - place)
    if "interleaved" in name:
        rounds = max(1, m // p)
        first = (v - 1) * (m // rounds) + (2 if name == "interleaved1f1b" else 1) * (p - 1 - place)
        return min(m, (first + 1) / v)  # each of these units is one of v stages
    return m
