"""The loop that an expert writes with torch alone for each strategy.

scripts/bench.py measures ours against it.

single       torch.compile of the complete model
ddp          DistributedDataParallel around it; what the algorithms of `scratch` are compared with
fsdp         fully_shard of every compiled block, then of the model; over two axes it is HSDP
tp           parallelize_module by each block's plan, compiled blocks; where there are replicas,
             fully_shard of what this leaves
pipeline     torch.distributed.pipelining, compiled stages (bench_stock_pipeline.py)
mesh         the one of these that has its axes

All have bf16 autocast (FSDP2 its own policy), a compiled loss, the fused optimizer, and a batch
that stays on the device. A step returns its loss; None on a rank that does not have it.

Our Transformers add their blocks in the dtype of autocast, from which these loops profit as ours
do. In most Transformers of others, such as those of nanoGPT and transformers, the embedding is in
float32 under autocast, and so are all sums after it. `with_usual_sums` makes a model one of these.
"""

from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from scripts.bench_layouts import Layout
from scripts.bench_models import Model, made_up

Step = Callable[[], torch.Tensor | None]
STYLES = {"column": ColwiseParallel, "heads": ColwiseParallel, "row": RowwiseParallel}
USUAL_SUMS = "stock float32 sums"  # a loop


@partial(torch.compile, dynamic=False)
def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy for images, [b, classes], or of tokens, [b, n, classes].

    Compiled, it does not write 50,304 logits of each token in float32, for which the step of GPT-2
    took 90 ms in place of 70 (an H100, 2026-11-28).
    """
    return F.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())


def autocast(device: torch.device, half: bool) -> torch.autocast:
    """Return the context of bf16; without `half`, with which a test is exact, of float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=half)


def replicated_step(model: Model, device: torch.device, arguments: Namespace) -> Step:
    """Return the step of one device or, on several ranks, of DistributedDataParallel."""
    plain = model.make().to(device)
    optimizer = model.optimizer(plain.parameters())
    module: Any = torch.compile(plain)
    if dist.is_initialized():
        device_ids = [device] if device.type == "cuda" else None
        module = DistributedDataParallel(module, device_ids, gradient_as_bucket_view=True)
    inputs, targets = on_device(model, device, arguments.batch)

    def step() -> torch.Tensor:
        with autocast(device, arguments.half):
            loss = loss_of(module(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def with_usual_sums(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a Transformer of ours whose blocks are added in float32, also under autocast.

    Args:
        make: makes one whose first part is the embedding.
    """
    module = make()
    embedding = next(module.children())
    embedding.register_forward_hook(lambda module, inputs, sums: sums.float())
    return module


def divided_step(model: Model, device: torch.device, arguments: Namespace) -> Step:
    """Return the step of FSDP2 or HSDP, of tensor parallelism, or of both.

    The ranks along tp compute the same batch.
    """
    layout: Layout = arguments.layout
    mesh = make_mesh(layout, device)
    module = model.make().to(device)
    divide_layers(module.children(), mesh["tp"])
    for block in module.children():
        block.compile()
    half = arguments.half
    if layout.replicate * layout.shard > 1:
        shard(module, list(module.children()), mesh, arguments)
        half = False  # its policy takes the place of autocast
    optimizers = optimizers_of(model, module)
    inputs, targets = on_device(model, device, arguments.batch * layout.tp)

    def step() -> torch.Tensor:
        with autocast(device, half):
            loss = loss_of(module(inputs), targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def mesh_step(model: Model, device: torch.device, arguments: Namespace) -> Step:
    """Return the step of the strongest of torch's own ways that has these axes."""
    layout: Layout = arguments.layout
    if layout.pp > 1:
        from scripts.bench_stock_pipeline import pipelined_step

        return pipelined_step(model, device, arguments)
    if layout.tp == layout.shard == 1:
        return replicated_step(model, device, arguments)
    return divided_step(model, device, arguments)


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks; those along tp are neighbours, as they send most."""
    names = ("pp", "replicate", "shard", "tp")
    return init_device_mesh(
        device.type, tuple(getattr(layout, name) for name in names), mesh_dim_names=names
    )


def divide_layers(blocks: Iterable[nn.Module], along_tp: DeviceMesh) -> None:
    """Divide the layers of blocks by their plans; where the mesh has one rank, leave them."""
    if along_tp.size() == 1:
        return
    for block in blocks:
        plan: dict[str, str] = getattr(block, "tensor_parallel", {})
        styles: dict[str, ParallelStyle] = {
            name: STYLES[word]() for name, word in plan.items() if word in STYLES
        }
        if styles:
            parallelize_module(block, along_tp, styles)


def shard(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    arguments: Namespace,
    **options: Any,
) -> None:
    """Apply fully_shard to blocks and, for what they share, to the module that has them."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layout: Layout = arguments.layout
    along_dp = mesh["replicate", "shard"] if layout.replicate > 1 else mesh["shard"]
    half = torch.bfloat16 if arguments.half else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    uses = Counter(parameter for block in blocks for parameter in set(block.parameters()))
    for block in blocks:
        if all(uses[parameter] == 1 for parameter in block.parameters()):
            fully_shard(block, mesh=along_dp, mp_policy=policy, **options)
    fully_shard(module, mesh=along_dp, mp_policy=policy, **options)


def optimizers_of(model: Model, module: nn.Module) -> list[torch.optim.Optimizer]:
    """Return an optimizer for each mesh that parameters are on: one kernel cannot update two."""
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in module.parameters():
        by_mesh[getattr(parameter, "device_mesh", None)].append(parameter)
    return [model.optimizer(parameters) for parameters in by_mesh.values()]


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
    **dict.fromkeys(("fsdp", "tp", "mesh", "pipeline", "ddp_pipeline"), mesh_step),
}


def why_no_stock_loop(strategy: str, layout: Layout) -> str | None:
    """Return why torch alone has no loop to measure a strategy against; None if it has.

    Args:
        strategy: its name.
        layout: its layout.
    """
    if strategy not in STOCK:
        return f"torch has no loop like strategy={strategy}"
    if layout.sequence_parallel:
        return "no stock loop here shares the tokens"
    if "zerobubble" in layout.schedule:
        return "torch compiles no stage whose backward pass is cut in two"
    return None
