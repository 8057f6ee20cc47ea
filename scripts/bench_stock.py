"""The loop that an expert writes with torch alone for each strategy.

scripts/bench.py measures ours against it.

single       torch.compile of the complete model
ddp          DistributedDataParallel around it; what the algorithms of `scratch` are compared with
fsdp         fully_shard of every compiled block, then of the model
pipeline     torch.distributed.pipelining, 1F1B with eight micro-batches, compiled stages
tp           parallelize_module by each block's plan, compiled blocks

All have bf16 autocast (FSDP2 its own policy), a compiled loss, the fused optimizer, and a batch
that stays on the device.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from scripts.bench_models import Model, made_up

MICRO_BATCHES = 8
Step = Callable[[], None]
STYLES = {"column": ColwiseParallel, "heads": ColwiseParallel, "row": RowwiseParallel}


@partial(torch.compile, dynamic=False)
def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy for images, [b, classes], or of tokens, [b, n, classes].

    Compiled, it does not write 50,304 logits of each token in float32, for which the step of GPT-2
    took 90 ms in place of 70 (an H100, 2026-11-28).
    """
    return F.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())


def replicated_step(model: Model, device: torch.device, arguments: Namespace) -> Step:
    """Return the step of one device or, on several ranks, of DistributedDataParallel."""
    plain = model.make().to(device)
    optimizer = model.optimizer(plain.parameters())
    module: Any = torch.compile(plain)
    if dist.is_initialized():
        device_ids = [device] if device.type == "cuda" else None
        module = DistributedDataParallel(module, device_ids, gradient_as_bucket_view=True)
    inputs, targets = on_device(model, device, arguments.batch)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(module(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded_step(model: Model, device: torch.device, arguments: Namespace) -> Step:
    """Return the step of FSDP2."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = model.make().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in module.children():
        block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(module, mp_policy=policy)
    optimizer = model.optimizer(module.parameters())
    inputs, targets = on_device(model, device, arguments.batch)

    def step() -> None:
        loss_of(module(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Autocast(nn.Module):
    """A stage of a pipeline whose forward pass computes in bf16 and returns the dtype that is sent.

    Args:
        blocks: of the stage.
        dtype: of what it returns.
    """

    def __init__(self, blocks: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.blocks = blocks
        self.dtype = dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            outputs = self.blocks(inputs)
        return outputs.to(self.dtype)


def pipelined_step(model: Model, device: torch.device, arguments: Namespace) -> Step:
    """Return the step of a pipeline with a stage of equally many blocks on each rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    ranks = dist.get_world_size()
    blocks = list(model.make().to(device).children())
    first = [len(blocks) * number // ranks for number in range(ranks + 1)]
    stage_blocks = nn.Sequential(*blocks[first[rank] : first[rank + 1]])
    between = nn.Sequential(*blocks[: first[1]])
    size = arguments.batch * ranks // MICRO_BATCHES
    inputs, targets = on_device(model, device, arguments.batch * ranks)
    last = rank == ranks - 1
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        shape = between(inputs[:1]).shape[1:] if rank == 0 else torch.Size()
    shapes = [shape]
    dist.broadcast_object_list(shapes, src=0)
    activations = torch.empty(
        size, *shapes[0], device=device, dtype=torch.bfloat16, requires_grad=True
    )
    stage = Autocast(stage_blocks, torch.float32 if last else torch.bfloat16)
    with torch.no_grad():
        outputs = stage(inputs[:size] if rank == 0 else activations)
    stage.compile()
    torch_stage = PipelineStage(
        stage,
        rank,
        ranks,
        device,
        input_args=inputs[:size] if rank == 0 else activations,
        output_args=outputs.detach().requires_grad_(),
    )
    schedule = Schedule1F1B(torch_stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = model.optimizer(stage_blocks.parameters())

    def step() -> None:
        if rank == 0:
            schedule.step(inputs, target=targets if last else None, return_outputs=False)
        else:
            schedule.step(target=targets if last else None, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    return step


def tensor_parallel_step(model: Model, device: torch.device, arguments: Namespace) -> Step:
    """Return the step of tensor parallelism, all ranks of which compute the same batch."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    module = model.make().to(device)
    for block in module.children():
        plan: dict[str, str] = getattr(block, "tensor_parallel", {})
        styles: dict[str, ParallelStyle] = {
            name: STYLES[word]() for name, word in plan.items() if word in STYLES
        }
        if styles:
            parallelize_module(block, mesh, styles)
        block.compile()
    sharded = [parameter for parameter in module.parameters() if hasattr(parameter, "placements")]
    others = [
        parameter for parameter in module.parameters() if not hasattr(parameter, "placements")
    ]
    # One kernel cannot update tensors of a mesh and others.
    optimizers = [model.optimizer(sharded), model.optimizer(others)]
    inputs, targets = on_device(model, device, arguments.batch * ranks)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(module(inputs), targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def on_device(model: Model, device: torch.device, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of one batch on the device, images as floats."""
    inputs, targets = made_up(size, model)
    inputs = inputs.to(device)
    if inputs.dtype == torch.uint8:
        inputs = inputs.float() / (255 * 0.5) - 1
    return inputs, targets.to(device)


STOCK: dict[str, Callable[[Model, torch.device, Namespace], Step]] = {
    "single": replicated_step,
    "ddp": replicated_step,
    "scratch": replicated_step,
    "fsdp": sharded_step,
    "pipeline": pipelined_step,
    "tp": tensor_parallel_step,
    "mesh": tensor_parallel_step,
}
