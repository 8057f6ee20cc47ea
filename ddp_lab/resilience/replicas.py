"""Whether the replicas of a model still are replicas: the promise that data parallelism rests on."""

import torch
import torch.distributed as dist

from ddp_lab.strategies.base import Strategy, local


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Of the tensor's bits, [], int64: equal tensors have equal ones, and one flipped bit another."""
    flat = local(tensor).detach().contiguous().flatten()
    bits = flat.view(torch.int32 if flat.element_size() % 4 == 0 else torch.uint8).long()
    places = torch.arange(len(bits), device=bits.device) % 65521 + 1  # so that two values that changed places are seen
    return (bits * places).sum()


def first_difference(strategy: Strategy) -> tuple[str, int] | None:
    """The name of the first tensor that is not the same on all replicas, and the first replica where it is another than on
    replica 0; None where all agree. Collective; waits for the device.

    Parameters always; buffers where BatchNorm's statistics are everybody's (elsewhere they differ while training).
    """
    if strategy.dp_size == 1 or strategy.sharded:
        return None
    tensors = dict(strategy.module.named_parameters())
    if strategy.batch_norm == "sync":
        tensors |= dict(strategy.module.named_buffers())
    mine = torch.stack([checksum(tensor) for tensor in tensors.values()])
    everybodys = [torch.empty_like(mine) for _ in range(strategy.dp_size)]
    dist.all_gather(everybodys, mine, group=strategy.dp_group)
    different = (torch.stack(everybodys) != everybodys[0]).nonzero().tolist()  # [replica, tensor]
    if not different:
        return None
    number, replica = min((tensor, replica) for replica, tensor in different)
    return list(tensors)[number], replica
