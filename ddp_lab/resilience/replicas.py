"""Comparison of the model replicas, which data parallelism assumes to be identical on all ranks."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.dtensor import local


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of the tensor's bits, [], int64. A single flipped bit changes it."""
    flat = local(tensor).detach().contiguous().flatten()
    bits = flat.view(torch.int32 if flat.element_size() % 4 == 0 else torch.uint8).long()
    # weights, so that two swapped values change the sum
    places = torch.arange(len(bits), device=bits.device) % 65521 + 1
    return (bits * places).sum()


def first_difference(
    strategy: Strategy, averages: Mapping[str, torch.Tensor]
) -> tuple[str, int] | None:
    """Compare the model's tensors and their averages over all replicas.

    Collective; waits for the device.

    Parameters are always compared. Buffers are compared only with synchronised BatchNorm: otherwise
    each replica has its own statistics during training.

    Args:
        averages: averages of tensors of the model by their names (`training.ema`); empty if there
            are none.

    Returns:
        The name of the first tensor that is not the same on all replicas, and the first replica
        whose tensor differs from that of replica 0. None if all are equal, or if nothing is
        compared: with one replica or with sharded parameters.
    """
    if strategy.dp_size == 1 or strategy.sharded:
        return None
    tensors = dict(strategy.module.named_parameters())
    if strategy.batch_norm == "sync":
        tensors |= dict(strategy.module.named_buffers())
    tensors |= {f"the average of {name}": averages[name] for name in tensors if name in averages}
    checksums = torch.stack([checksum(tensor) for tensor in tensors.values()])
    gathered = [torch.empty_like(checksums) for _ in range(strategy.dp_size)]
    dist.all_gather(gathered, checksums, group=strategy.dp_group)
    different = (torch.stack(gathered) != gathered[0]).nonzero().tolist()  # [replica, tensor]
    if not different:
        return None
    number, replica = min((tensor, replica) for replica, tensor in different)
    return list(tensors)[number], replica
