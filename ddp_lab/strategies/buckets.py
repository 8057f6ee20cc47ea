"""Buckets of gradients, each summed while the backward pass computes the next.

The sum of a bucket over the ranks is one collective.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ddp_lab.strategies.contiguous import flatten, unflatten
from ddp_lab.strategies.gradients import all_gradients_of, by_dtype, set_gradients, trainable
from ddp_lab.strategies.parameter_hooks import OfStrategy

MiB = 2**20


class Bucket:
    """Parameters whose gradients are summed in one collective.

    Attributes:
        missing: number of their gradients that the current backward pass has not computed yet.
        pending: the flattened gradients and the collective that sums them; None until it is
            launched.
    """

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.missing = len(parameters)
        self.pending: tuple[torch.Tensor, dist.Work] | None = None


class Buckets:
    """Buckets of gradients summed while the backward pass still computes those of earlier layers.

    A hook on each parameter runs when its gradient is complete. The last gradient of a bucket
    launches the bucket's all-reduce. The backward pass goes from the last layer to the first, so
    the last layers' bucket is complete first. Only the all-reduce of the first layers' bucket has
    no computation left that could hide it.

    All ranks launch the buckets in the same order, also where they use different parameters: a
    bucket waits for those before it. What is not complete at the end of the backward pass, because
    a parameter was not used, is launched by `finish`.

    Args:
        groups: parameters of each bucket. Frozen parameters are left out, and those of another type
            get a bucket of their own.

    Attributes:
        active: whether gradients are counted and sent; False during gradient accumulation
            (`Strategy.no_sync`).
    """

    def __init__(self, groups: Iterable[list[nn.Parameter]]):
        self.active = True
        self.buckets = [
            Bucket(same) for parameters in groups for same in by_dtype(trainable(parameters))
        ]
        self._launched = 0  # buckets of this step
        self._handles: list[RemovableHandle] = []
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                hook = OfStrategy(lambda _, bucket=bucket: self._count(bucket))
                handle = parameter.register_post_accumulate_grad_hook(hook)
                self._handles.append(handle)

    def remove(self) -> None:
        """Let the backward pass count no gradients any more, because other buckets do."""
        for handle in self._handles:
            handle.remove()

    def _count(self, bucket: Bucket) -> None:
        if not self.active:
            return
        bucket.missing -= 1
        while self._launched < len(self.buckets) and self.buckets[self._launched].missing == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self.buckets[self._launched]
        flattened = flatten(all_gradients_of(bucket.parameters))
        bucket.pending = flattened, dist.all_reduce(flattened, async_op=True)
        self._launched += 1

    def finish(self) -> None:
        """Sum what is left, wait for all collectives, and replace the gradients by the sums.

        Every parameter has a gradient.
        """
        while self._launched < len(self.buckets):
            self._launch_next()
        for bucket in self.buckets:
            assert bucket.pending is not None
            flattened, work = bucket.pending
            work.wait()
            set_gradients(
                bucket.parameters, unflatten(flattened, all_gradients_of(bucket.parameters))
            )
            bucket.missing = len(bucket.parameters)
            bucket.pending = None
        self._launched = 0


def fill_buckets(parameters: Sequence[nn.Parameter], size: float) -> list[list[nn.Parameter]]:
    """Divide the parameters, from the last to the first, into buckets of at least `size` bytes.

    The last bucket may be smaller.
    """
    buckets: list[list[nn.Parameter]] = [[]]
    for parameter in reversed(parameters):
        if sum(parameter_in_bucket.nbytes for parameter_in_bucket in buckets[-1]) >= size:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets
