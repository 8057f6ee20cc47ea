"""Five ways of summing the gradients over the ranks; every rank gets the sums.

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
PIECE = 2**16  # elements that torch.cat gets at once


def star(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rank 0 gathers, adds and hands out: its link carries all of it. In place."""
    first = dist.get_rank() == 0
    for gradient in map(in_memory_order, gradients):
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())] if first else None
        dist.gather(gradient, parts, dst=0)
        if first:
            gradient.copy_(torch.stack(parts).sum(0))
        dist.broadcast(gradient, src=0)
    return gradients


def per_tensor(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """One collective for each tensor, as the textbook does it. Each pays the latency: LeNet has 8 tensors, ResNet-18 62.
    In place."""
    for gradient in gradients:
        dist.all_reduce(in_memory_order(gradient))
    return gradients


def flat(gradients: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """One collective for all: the latency is paid once, for the price of a copy. The sums are views of it."""
    together = flatten(gradients)
    dist.all_reduce(together, group=group)
    return unflatten(together, gradients)


def ring(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
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
    return unflatten(padded[: len(together)], gradients)


ALGORITHMS: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "star": star,
    "per_tensor": per_tensor,
    "flat": flat,
    "ring": ring,
}


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One after the other, [n], each in the order of `in_memory_order`.

    In pieces, because torch.cat gives all its inputs as many thread blocks as the largest needs: ResNet-18's 62 gradients took
    an H200 160 us as they are.
    """
    return torch.cat([piece for tensor in tensors for piece in in_memory_order(tensor).flatten().split(PIECE)])


def unflatten(together: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """The way back, without a copy: views of the parts, each with the shape of one of `like`."""
    ordered = [in_memory_order(tensor) for tensor in like]
    parts = together.split([tensor.numel() for tensor in like])
    views = [part.view_as(tensor) for part, tensor in zip(parts, ordered, strict=True)]
    return [
        view if ours is theirs else view.permute(0, 3, 1, 2) for view, ours, theirs in zip(views, ordered, like, strict=True)
    ]


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A view that is contiguous where the tensor is, channels first or channels last: else flattening would be a copy."""
    return tensor if tensor.is_contiguous() or tensor.dim() != 4 else tensor.permute(0, 2, 3, 1)


class Bucket:
    """Some parameters whose gradients travel together."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters, self.missing = parameters, len(parameters)
        self.together: torch.Tensor | None = None
        self.work: dist.Work | None = None


class Buckets:
    """Sends gradients while backward still computes earlier layers': each bucket when the last of its gradients is there.

    Backward goes through the layers from the last to the first, so the last bucket is full first; hooks that run behind a
    parameter's gradient count them. What is left to wait for after backward is the first bucket.

    Args:
        groups: the parameters of each bucket; those without any are left out.
    """

    def __init__(self, groups: Iterable[list[nn.Parameter]]):
        self.active = True
        self.buckets = [Bucket(parameters) for parameters in groups if parameters]
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._count(bucket))

    def _count(self, bucket: Bucket) -> None:
        if not self.active:
            return
        bucket.missing -= 1
        if bucket.missing == 0:
            bucket.together = flatten(gradients_of(bucket.parameters))
            bucket.work = dist.all_reduce(bucket.together, async_op=True)

    def finish(self) -> None:
        """After backward: waits for what is on its way; the sums become the gradients."""
        for bucket in self.buckets:
            bucket.work.wait()
            set_gradients(bucket.parameters, unflatten(bucket.together, gradients_of(bucket.parameters)))
            bucket.missing, bucket.together, bucket.work = len(bucket.parameters), None, None


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters]


def set_gradients(parameters: Iterable[nn.Parameter], gradients: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
