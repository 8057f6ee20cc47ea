"""Steps for `verify`, right and wrong, which its processes import."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 8


def batch_of(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)).to(dtype)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def gradients(model: nn.Module, samples: torch.Tensor) -> dict:
    (model(samples) - 1).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def ddp(rank, world_size, batch):
    """Names have the prefix of the wrapper, and one parameter has no gradient."""
    model = network()
    model.register_parameter("unused", nn.Parameter(torch.zeros(1).double(), requires_grad=False))
    wrapped = DistributedDataParallel(model) if world_size > 1 else model
    return gradients(wrapped, batch[rank::world_size])


def fsdp(rank, world_size, batch):
    model = network(torch.float32)
    if world_size > 1:
        fully_shard(model)
    return gradients(model, batch.float().chunk(world_size)[rank])


def of_environment(rank, world_size, batch):
    """Return what a step sees of its process."""
    if world_size > 1:
        assert dist.get_backend() == "gloo"
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), str(world_size))
    else:
        assert not dist.is_initialized()
        assert "RANK" not in os.environ
    assert torch.get_num_threads() == 1
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    return {"random": torch.rand(3), "batch": batch}


def raises(rank, world_size, batch):
    if world_size == 2 and rank == 1:
        raise ValueError("no such sample")
    if world_size > 1:
        dist.barrier()
    return {"weight": torch.ones(2)}


def raises_alone(rank, world_size, batch):
    return {"weight": torch.ones(2) / batch[100]}


def exits(rank, world_size, batch):
    if world_size == 2 and rank == 1:
        os._exit(3)
    if world_size == 2:
        dist.barrier()  # fails, because rank 1 has ended
    if world_size == 3:
        sys.exit("enough")
    return {"weight": torch.ones(2)}


def hangs(rank, world_size, batch):
    if world_size == 2 and rank == 0:
        dist.barrier()
    if world_size == 3 and rank == 2:
        time.sleep(1000)
    return {"weight": torch.ones(2)}


def returns_list(rank, world_size, batch):
    return [torch.ones(2)]


def returns_number(rank, world_size, batch):
    return {"loss": 1.0}


def returns_nothing(rank, world_size, batch):
    return {}


def unsummed(rank, world_size, batch):
    """The all-reduce is missing."""
    return gradients(network(), batch.chunk(world_size)[rank])


def more_on_several(rank, world_size, batch):
    tensors = {"weight": torch.ones(2)}
    return tensors | {"seen": torch.zeros(1)} if world_size > 1 else tensors


def kept(rank, world_size, batch, path):
    """Write the ids of the processes, and never end on two ranks."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()} {os.getppid()}\n")
    if world_size > 1:
        dist.barrier()
        time.sleep(1000)
    return {"weight": torch.ones(2)}


def dispatch(rank, world_size, named):
    """Run the step of a name, so that tests share the process that ranks are forked from."""
    name, batch = named
    return globals()[name](rank, world_size, batch)
