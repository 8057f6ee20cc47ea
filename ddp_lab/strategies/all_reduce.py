"""Five ways of summing the gradients over the ranks; each leaves the sum in place on every rank.

With W ranks and n bytes of gradients, a rank sends and receives about

| algorithm | what a rank moves | messages | |
|---|---|---|---|
| star | rank 0: W n in and W n out; others n and n | 2 for each tensor | the books' first: one gathers, adds, hands out |
| per_tensor | 2 n (W-1)/W | as the library does it, for each tensor | |
| flat | the same | one collective | |
| ring | the same | 2 (W-1) | what the library's ring does, with send and receive |
| bucketed | the same | one collective for each bucket | and while backward is still at work |

(Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", for 2 n (W-1)/W.)
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

MiB = 2**20


def star(gradients: list[torch.Tensor]) -> None:
    """Rank 0 gathers, adds and hands out: its link carries all of it."""
    first = dist.get_rank() == 0
    for gradient in map(in_memory_order, gradients):
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())] if first else None
        dist.gather(gradient, parts, dst=0)
        if first:
            gradient.copy_(torch.stack(parts).sum(0))
        dist.broadcast(gradient, src=0)


def per_tensor(gradients: list[torch.Tensor]) -> None:
    """One collective for each tensor, as the textbook does it. Each pays the latency: LeNet has 8 tensors, ResNet-18 62."""
    for gradient in gradients:
        dist.all_reduce(in_memory_order(gradient))


def flat(gradients: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """One collective for all: the latency is paid once, for the price of copying every gradient out and back."""
    together = flatten(gradients)
    dist.all_reduce(together, group=group)
    unflatten(together, gradients)


def ring(gradients: list[torch.Tensor]) -> None:
    """Every rank sends to its right neighbour and receives from its left one, all at once. W-1 rounds in which the parts pile
    up, until each rank has the whole sum of one part; W-1 in which the sums go round."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    together = flatten(gradients)
    padded = torch.cat([together, together.new_zeros(-len(together) % world_size)])
    parts = padded.chunk(world_size)
    received = torch.empty_like(parts[0])

    def pass_on(send: int, into: torch.Tensor) -> None:
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, parts[send % world_size], right), dist.P2POp(dist.irecv, into, left)]
        ):
            work.wait()

    for turn in range(world_size - 1):
        pass_on(rank - turn, received)
        parts[(rank - turn - 1) % world_size].add_(received)
    for turn in range(world_size - 1):
        pass_on(rank - turn + 1, parts[(rank - turn) % world_size])
    unflatten(padded[: len(together)], gradients)


ALGORITHMS: dict[str, Callable[[list[torch.Tensor]], None]] = {
    "star": star,
    "per_tensor": per_tensor,
    "flat": flat,
    "ring": ring,
}


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One after the other, [n], each in the order of its own memory."""
    return torch.cat([in_memory_order(tensor).flatten() for tensor in tensors])


def unflatten(together: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """The way back, into the same tensors."""
    views = [in_memory_order(tensor) for tensor in tensors]
    parts = together.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(views, [part.view_as(view) for part, view in zip(parts, views, strict=True)])


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A view that is contiguous: channels_last costs a copy otherwise, in each direction."""
    return tensor if tensor.is_contiguous() or tensor.dim() != 4 else tensor.permute(0, 2, 3, 1)


class Bucket:
    """Some parameters whose gradients travel together."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.missing = 0
        self.together: torch.Tensor | None = None
        self.work: dist.Work | None = None


class Buckets:
    """Sends gradients while backward still computes earlier layers': each bucket when the last of its gradients is there.

    Backward goes through the layers from the last to the first, so the buckets are filled in that order; hooks that run behind
    a parameter's gradient count them. What is left to wait for after backward is the last bucket.

    Args:
        parameters: in forward order.
        bucket_bytes: how much travels together: small buckets start early, large ones pay the latency less often.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], bucket_bytes: float):
        self.active = True
        self.buckets = [Bucket()]
        for parameter in reversed(list(parameters)):
            held = sum(p.numel() * p.element_size() for p in self.buckets[-1].parameters)
            if held and held + parameter.numel() * parameter.element_size() > bucket_bytes:
                self.buckets.append(Bucket())
            bucket = self.buckets[-1]
            bucket.parameters.append(parameter)
            parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._count(bucket))
        self._begin()

    def _begin(self) -> None:
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def _count(self, bucket: Bucket) -> None:
        if not self.active:
            return
        bucket.missing -= 1
        if bucket.missing == 0:
            bucket.together = flatten(parameter.grad for parameter in bucket.parameters)
            bucket.work = dist.all_reduce(bucket.together, async_op=True)

    def finish(self) -> None:
        """Behind backward: waits for what is on its way, and puts the sums back."""
        for bucket in self.buckets:
            bucket.work.wait()
            unflatten(bucket.together, [parameter.grad for parameter in bucket.parameters])
            bucket.together = bucket.work = None
        self._begin()
