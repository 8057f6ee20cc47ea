"""The training of peer_data.py as users of other libraries write it, each as in its documentation.

Every function runs on one rank of a world, trains one epoch in order, and returns the weights. With
`by_global_weight` a loss is divided by the weight of the global batch, and not of a micro-batch.

- DDP: https://docs.pytorch.org/docs/stable/notes/ddp.html, with `no_sync` of its reference
- FSDP2: https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html
- Accelerate: https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation, of which
  "Gradient accumulation on training samples of variable size" divides by the global weight
- Fabric: https://lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html
"""

import os
from contextlib import nullcontext
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from peer_data import (
    ACCUMULATE,
    BATCH,
    MAX_NORM,
    MICRO_BATCH,
    RANKS,
    Weights,
    local_mean,
    loss_sum,
    losses_and_weights,
    net,
    samples,
    sgd,
    weights_of,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TIMEOUT = timedelta(seconds=30)


def global_weight(micro_batches: list[list[torch.Tensor]]) -> torch.Tensor:
    """Return the weight of a step's samples over all ranks, []."""
    weight = torch.stack([targets[:, 1].sum() for _, targets in micro_batches]).sum()
    dist.all_reduce(weight)
    return weight


def train_torch(
    model: nn.Module, data: TensorDataset, by_global_weight: bool, max_norm: float = MAX_NORM
) -> Weights:
    """Train a model that DDP or FSDP2 has wrapped."""
    loader = DataLoader(data, MICRO_BATCH, sampler=DistributedSampler(data, shuffle=False))
    optimizer = sgd(model.parameters())
    batches = iter(loader)
    while micro_batches := list(islice(batches, ACCUMULATE)):
        weight = global_weight(micro_batches)
        for number, (inputs, targets) in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
            silent = isinstance(model, DistributedDataParallel) and not last
            with model.no_sync() if silent else nullcontext():
                outputs = model(inputs)
                if by_global_weight:
                    loss = loss_sum(outputs, targets) * RANKS / weight
                else:
                    loss = local_mean(outputs, targets) / ACCUMULATE
                loss.backward()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model.module if isinstance(model, DistributedDataParallel) else model)


def ddp(number: int, weighted: bool, by_global_weight: bool, max_norm: float = MAX_NORM) -> Weights:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    model = DistributedDataParallel(net())
    weights = train_torch(model, samples(number, weighted), by_global_weight, max_norm)
    dist.destroy_process_group()
    return weights


def fsdp2(
    number: int, weighted: bool, by_global_weight: bool, max_norm: float = MAX_NORM
) -> Weights:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    mesh = init_device_mesh("cpu", (RANKS,))
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    weights = train_torch(model, samples(number, weighted), by_global_weight, max_norm)
    dist.destroy_process_group()
    return weights


def accelerate(
    number: int, weighted: bool, by_global_weight: bool, max_norm: float = MAX_NORM
) -> Weights:
    from accelerate import Accelerator, InitProcessGroupKwargs

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATE,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=TIMEOUT)],
    )
    assert accelerator.num_processes == RANKS
    model = net()
    loader = DataLoader(samples(number, weighted), MICRO_BATCH)
    model, optimizer, loader = accelerator.prepare(model, sgd(model.parameters()), loader)
    if by_global_weight:
        batches = iter(loader)
        while micro_batches := list(islice(batches, ACCUMULATE)):
            local = torch.stack([targets[:, 1].sum() for _, targets in micro_batches]).sum()
            weight = accelerator.gather(local).sum()
            for position, (inputs, targets) in enumerate(micro_batches, start=1):
                last = position == len(micro_batches)
                with nullcontext() if last else accelerator.no_sync(model):
                    # Accelerate divides by both factors.
                    factors = accelerator.gradient_accumulation_steps * accelerator.num_processes
                    loss = loss_sum(model(inputs), targets) * factors / weight
                    accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    else:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = local_mean(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
    weights = weights_of(accelerator.unwrap_model(model))
    accelerator.end_training()
    return weights


def fabric(
    number: int, weighted: bool, by_global_weight: bool, max_norm: float = MAX_NORM
) -> Weights:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    # by which Fabric knows that torchrun has started it
    os.environ["TORCHELASTIC_RUN_ID"] = "peers"
    strategy = DDPStrategy(process_group_backend="gloo", timeout=TIMEOUT)
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    assert fabric.world_size == RANKS
    model = net()
    model, optimizer = fabric.setup(model, sgd(model.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(samples(number, weighted), MICRO_BATCH))
    weights = []
    if by_global_weight:
        batches = iter(loader)
        while micro_batches := list(islice(batches, ACCUMULATE)):
            local = torch.stack([targets[:, 1].sum() for _, targets in micro_batches]).sum()
            weights.append(fabric.all_reduce(local, reduce_op="sum"))
    for iteration, (inputs, targets) in enumerate(loader):
        is_accumulating = (iteration + 1) % ACCUMULATE != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            outputs = model(inputs)
            if by_global_weight:
                weight = weights[iteration // ACCUMULATE]
                loss = loss_sum(outputs, targets) * RANKS / weight
            else:
                loss = local_mean(outputs, targets) / ACCUMULATE
            fabric.backward(loss)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=max_norm)
            optimizer.step()
            optimizer.zero_grad()
    trained = weights_of(model.module)
    dist.destroy_process_group()
    return trained


def ours(strategy: str, number: int, weighted: bool, max_norm: float = MAX_NORM) -> Weights:
    """Train under a strategy of ddp_lab. Collective."""
    from ddp_lab import Lab

    with Lab(strategy, device="cpu", timeout=30.0) as lab:
        model = net()
        trainer = lab.trainer(model, losses_and_weights, sgd, BATCH, ACCUMULATE, max_norm)
        for inputs, targets in trainer.batches(samples(number, weighted), 0, shuffle=False):
            trainer.step(inputs, targets)
        return weights_of(trainer.strategy.module)
