"""torch's DistributedDataParallel: what scratch.py does, overlapped with the backward pass."""

import re
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lab.config.types import Positive
from ddp_lab.data.trees import Tree, apply, size
from ddp_lab.models.calls import call
from ddp_lab.models.kept_state import state_kept
from ddp_lab.models.outputs import sum_of
from ddp_lab.models.real_view import real_view
from ddp_lab.strategies.bare_calls import BareCalls, Passes
from ddp_lab.strategies.base import ALL_PERFORMANCE_OPTIONS, Strategy
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm
from ddp_lab.strategies.buckets import MiB
from ddp_lab.strategies.frozen import FrozenParameters
from ddp_lab.strategies.gradients import trainable
from ddp_lab.strategies.unused import (
    empty_error,
    refuse_unused,
    unsupported_with_unused,
    unused_error,
)
from ddp_lab.strategies.work_time import WorkTimer
from ddp_lab.world.runtime import Runtime

# Of torch's error in the step after one with unused parameters. `reduce_gradients` finds those that
# no gradient-accumulation step used; DDP also waits for those that only earlier ones used.
UNFINISHED = "Expected to have finished reduction in the prior iteration"


class Pass(AbstractContextManager[None]):
    """The context of a pass, which counts it and explains errors of DDP in it.

    A generator in its place would double what it costs in every step.

    Args:
        strategy: whose model is called.
        inputs: of the forward pass; None: there is none.
    """

    def __init__(self, strategy: "DDP", inputs: Any):
        self.strategy = strategy
        self.inputs = inputs

    def __enter__(self) -> None:
        self.strategy.passes.under_way += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        self.strategy.passes.under_way -= 1
        if isinstance(error, Exception):
            explained = self.strategy.explain(error, self.inputs)
            if explained is not None:
                raise explained from None


class DDP(Strategy):
    """Data parallelism by torch's DistributedDataParallel.

    Args:
        bucket_cap_mb: MiB of gradients that fill a bucket, which is sent as soon as its last
            gradient is computed; with compile=true the model is also compiled in pieces of that
            size.
        find_unused_parameters: whether steps may use some of the parameters only, on each rank
            others; costs a walk through autograd's graph and a small all-reduce in every step.
    """

    supports_own_steps = True
    computes_head_losses = True
    supported_options = ALL_PERFORMANCE_OPTIONS
    has_equal_work = True
    wrapper_class = DistributedDataParallel

    def __init__(
        self,
        runtime: Runtime,
        batch_norm: BatchNorm,
        bucket_cap_mb: Positive,
        find_unused_parameters: bool = False,
    ):
        super().__init__(runtime, batch_norm=batch_norm)
        self.find_unused_parameters = find_unused_parameters
        self.unsupported |= unsupported_with_unused(self)
        self.bucket_cap_mb = bucket_cap_mb
        self.bucket_sizes = (bucket_cap_mb * MiB,)
        self.passes = Passes()

    def replace_wrapper(self, wrapper_class: type[DistributedDataParallel]) -> None:
        self.wrapper_class = wrapper_class

    @property
    def may_leave_unused(self) -> bool:
        return bool(self.find_unused_parameters)  # DDP waits for every gradient also on one rank

    def setup(self, model: nn.Module) -> None:
        self.module = set_batch_norm(self.to_device(model), self.batch_norm)
        self.frozen = FrozenParameters(self)
        self._wrap()

    def refuse_bare_calls(self) -> None:
        self.module.register_forward_pre_hook(BareCalls(self.name, self.passes))

    def _wrap(self) -> None:
        """Let DDP reduce the gradients of the parameters that are not frozen now. Collective."""
        self.trained = [*trainable(self.module.parameters())]
        self.wrapper = self.wrapper_class(
            self.module,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=bool(self.find_unused_parameters),
            # saves 4 bytes per parameter and the copy back from the buckets
            gradient_as_bucket_view=True,
        )
        self.forward = self.wrapper
        group = self.wrapper.process_group
        if self.timer is None:
            self.wrapper.register_comm_hook(group, sum_bucket)
        else:
            self.wrapper.register_comm_hook(TimedGroup(group, self.timer), sum_timed_bucket)
        # buffers are sent when training mode ends (Strategy.train), not in every step
        self.wrapper.broadcast_buffers = False
        if not self.find_unused_parameters:  # with which DDP keeps its first buckets
            self._rebuild_buckets()

    def _rebuild_buckets(self) -> None:
        """Run a backward pass and discard its gradients, so that DDP's buckets do not change later.

        After its first backward pass DDP rebuilds its buckets in the order in which the gradients
        arrived. With more than two ranks this changes the order of addition. The first step of a
        resumed run would then differ in its last bits from the same step of an uninterrupted run.
        The pass is one of training mode, which may use other parameters than evaluation.
        """
        if self.example is None:  # a library's user has given no sample
            return
        example = apply(lambda tensor: torch.zeros_like(tensor, device=self.device), self.example)
        self.module.train()
        unchanged = state_kept(self.module, weights=self.written != {})
        with unchanged, self.pass_context(example, True), self.autocast():
            outputs = call(self.forward, example)
            if isinstance(outputs, torch.Tensor):
                total = real_view(outputs).sum()
            else:
                total = sum_of(outputs)
            total.backward()
            refuse_unused(self)

    def prepare_step(self) -> None:
        # A loop may freeze or unfreeze parameters between steps. DDP knows those of its beginning:
        # it would wait for the gradient of one that is frozen, and not send one that is not.
        if self.frozen.changed_before_step():
            self.wrapper._remove_autograd_hooks()  # pyright: ignore[reportPrivateUsage]
            self._wrap()
        if self.timer is not None:
            self.timer.begin()

    def no_sync(self) -> AbstractContextManager[None]:
        return self.wrapper.no_sync()

    def add_gradient(
        self, inputs: Tree, targets: Tree, num_valid: int, divisor: float | torch.Tensor
    ) -> torch.Tensor:
        with self.pass_context(inputs, num_valid > 0):
            return super().add_gradient(inputs, targets, num_valid, divisor)

    def pass_context(self, inputs: Any, has_samples: bool) -> AbstractContextManager[None]:
        return Pass(self, inputs)

    def explain(self, error: Exception, inputs: Any) -> Exception | None:
        """Return an error in place of one of a pass; None: torch's own says what is wrong."""
        if UNFINISHED in str(error) and not self.find_unused_parameters:
            return unused_error(self, self._name_in(str(error)), self.runtime.rank)
        if inputs is not None and size(inputs) == 0 and self.find_unused_parameters:
            return empty_error(self, error)
        return None

    def reduce_gradients(self) -> None:
        self.frozen.require_same_in_step()  # within a step it is too late for other buckets
        unused = any(parameter.grad is None for parameter in self.trained)
        if unused and not self.find_unused_parameters:
            refuse_unused(self)  # torch says it in the next step, by numbers

    def _name_in(self, error: str) -> str:
        """Return the name of the first parameter whose number is in torch's error."""
        number = re.search(r"did not receive grad for rank \d+: (\d+)", error)
        names = [
            name for name, parameter in self.module.named_parameters() if parameter.requires_grad
        ]
        return names[int(number[1])] if number else names[-1]


def sum_bucket(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket of gradients over the ranks, which DDP without a hook averages.

    The loss is divided by the size of the global batch already. To make up for an average it would
    be multiplied by the number of ranks, and so would every gradient that hooks on activations and
    backward passes of the user's own see.
    """
    buffer = bucket.buffer()
    if bucket.is_last() and buffer.device.type == "cpu":
        # Nothing is left to be computed meanwhile. A callback would run in a thread of gloo, which
        # costs 0.1 ms: it has to wake up, and to get Python's lock.
        dist.all_reduce(buffer, group=group)
        summed = torch.futures.Future[torch.Tensor]()
        summed.set_result(buffer)
        return summed
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None  # None is for ranks outside of the group
    return work.get_future().then(first_of)


class TimedGroup(NamedTuple):
    """The ranks that sum their gradients, and what times the work before.

    The reducer of DDP keeps it. It must not refer to the strategy, which keeps the reducer: C++
    would hide this cycle from Python, and the process group would never be freed.
    """

    group: dist.ProcessGroup | None
    timer: WorkTimer


def sum_timed_bucket(
    timed: TimedGroup,
    bucket: dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket as `sum_bucket`. With the last one all gradients of this rank are computed."""
    if bucket.is_last():
        timed.timer.end()
    return sum_bucket(timed.group, bucket)


def first_of(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    """Return the only tensor of a collective."""
    return future.value()[0]
