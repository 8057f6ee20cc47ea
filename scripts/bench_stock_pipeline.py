"""The pipeline that an expert writes with torch.distributed.pipelining.

Each rank has one stage of equally many blocks, or two where the schedule is interleaved. The
replicas of a stage are those of DistributedDataParallel or, if they are sharded or their layers are
divided, of fully_shard, which keeps the gathered parameters for all micro-batches.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from scripts.bench_layouts import Layout
from scripts.bench_models import Model
from scripts.bench_stock import (
    Step,
    autocast,
    divide_layers,
    loss_of,
    make_mesh,
    on_device,
    optimizers_of,
    shard,
)


class Autocast(nn.Module):
    """A stage whose forward pass computes in bf16 and returns the dtype that is sent.

    Args:
        blocks: of the stage.
        half: whether to compute in bf16; not where fully_shard does.
        dtype: of what it returns.
    """

    def __init__(self, blocks: nn.Module, half: bool, dtype: torch.dtype):
        super().__init__()
        self.blocks = blocks
        self.computes_in_half = half
        self.dtype = dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.computes_in_half):
            outputs = self.blocks(inputs)
        return outputs.to(self.dtype)


def pipelined_step(model: Model, device: torch.device, arguments: Namespace) -> Step:
    """Return the step of a pipeline, all ranks of which compute the same batch."""
    from torch.distributed.pipelining import PipelineStage

    layout: Layout = arguments.layout
    mesh = make_mesh(layout, device)
    rank = mesh["pp"].get_local_rank()
    number = layout.pp * layout.stages_of_device
    blocks = list(model.make().to(device).children())
    first = [len(blocks) * stage // number for stage in range(number + 1)]
    parts = [blocks[begin:end] for begin, end in pairwise(first)]
    tied = tied_names(parts)

    inputs, targets = on_device(model, device, arguments.batch * layout.copies_of_batch)
    shapes = shapes_between(parts, inputs[:1], arguments.half)
    size = len(inputs) // layout.num_microbatches
    sent = torch.bfloat16 if arguments.half else torch.float32
    mine = {
        stage: Autocast(nn.Sequential(*parts[stage]), arguments.half, sent)
        for stage in range(rank, number, layout.pp)
    }
    stages = list[Any]()
    for stage, module in mine.items():
        before = torch.empty(size, *shapes[stage], device=device, dtype=sent, requires_grad=True)
        after = torch.empty(size, *shapes[stage + 1], device=device, dtype=sent)
        # Their shapes are known, so that no stage runs to find them.
        stages.append(
            PipelineStage(
                wrapped(module, mesh, arguments),
                stage,
                number,
                device,
                input_args=before if stage else inputs[:size],
                output_args=after.requires_grad_(),
                group=mesh["pp"].get_group(),
            )
        )
    schedule = schedule_of(layout, stages)
    del blocks, parts
    copies = [mine[stage].blocks.get_parameter(name) for stage, name in tied if stage in mine]
    ends = group_of_ends(mesh) if tied else None
    optimizers = optimizers_of(model, nn.ModuleList(mine.values()))
    has_loss = number - 1 in mine

    def step() -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        schedule.step(
            *([inputs] if rank == 0 else []),
            target=targets if has_loss else None,
            losses=losses if has_loss else None,
            return_outputs=False,
        )
        for copy in copies:
            add_over(copy, ends)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses).mean() if has_loss else None

    return step


def shapes_between(
    parts: Sequence[Sequence[nn.Module]], inputs: torch.Tensor, half: bool
) -> list[torch.Size]:
    """Return the shapes of a sample before each stage, and of its outputs."""
    shapes = [inputs.shape[1:]]
    with torch.no_grad(), autocast(inputs.device, half):
        for part in parts:
            for block in part:
                block.eval()
                inputs = block(inputs)
                block.train()
            shapes.append(inputs.shape[1:])
    return shapes


def wrapped(module: Autocast, mesh: DeviceMesh, arguments: Namespace) -> nn.Module:
    """Return a stage, compiled, that sums its gradients over its replicas."""
    layout: Layout = arguments.layout
    replicas = layout.replicate * layout.shard
    assert isinstance(module.blocks, nn.Sequential)
    blocks = list(module.blocks.children())
    if layout.tp == layout.shard == 1:
        module.compile()
        if replicas == 1:
            return module
        return DistributedDataParallel(
            module, process_group=mesh["replicate"].get_group(), gradient_as_bucket_view=True
        )
    divide_layers(blocks, mesh["tp"])
    for block in blocks:
        block.compile()
    if replicas > 1:
        module.computes_in_half = False  # fully_shard's policy takes its place
        shard(module, blocks, mesh, arguments, reshard_after_forward=False)
    return module


def schedule_of(layout: Layout, stages: Sequence[Any]) -> Any:
    """Return torch's schedule of the stages of this rank."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    chosen: Any = get_schedule_class(layout.schedule)
    of_rank = stages[0] if issubclass(chosen, PipelineScheduleSingle) else list(stages)
    return chosen(of_rank, layout.num_microbatches, loss_fn=loss_of)


def tied_names(parts: Sequence[Sequence[nn.Module]]) -> list[tuple[int, str]]:
    """Return stage and name, within its blocks, of each parameter that several stages have."""
    named = [
        (stage, name, parameter)
        for stage, part in enumerate(parts)
        for name, parameter in nn.Sequential(*part).named_parameters()
    ]
    uses = Counter(parameter for _, _, parameter in named)
    return [(stage, name) for stage, name, parameter in named if uses[parameter] > 1]


def group_of_ends(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the group of the first and the last rank of this rank's pipeline."""
    mine = None
    pipelines = mesh.mesh.flatten(1).T.tolist()
    for ranks in pipelines:
        ends = [ranks[0], ranks[-1]]
        group = dist.new_group(ends)
        if dist.get_rank() in ends:
            mine = group
    return mine


def add_over(copy: nn.Parameter, group: dist.ProcessGroup | None) -> None:
    """Add the gradient of a parameter over its copies."""
    gradient = copy.grad
    assert gradient is not None
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    dist.all_reduce(gradient, group=group)
