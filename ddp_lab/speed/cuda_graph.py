"""A complete training step as one CUDA graph: gather, forward, backward, all-reduce, optimizer.

In eager mode a step of LeNet takes the host ten times as long as the GPU. A graph is captured once
and replayed by one call. The values that change from step to step, the batch and the learning rate,
are read from fixed addresses in memory.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from ddp_lab.data.batch import Batch
from ddp_lab.data.loader import DeviceLoader, Loader
from ddp_lab.data.trees import chunk, size
from ddp_lab.models.buffers import replace_buffer_of
from ddp_lab.models.python_state import restore_attributes
from ddp_lab.observe.log import log
from ddp_lab.speed.host_state import HostState, attributes_of, difference_of
from ddp_lab.speed.waits import waits_for_gpu
from ddp_lab.strategies.work_time import EventTimer
from ddp_lab.training.optimizer import state_tensors
from ddp_lab.training.step import Step

WARM_UP = 11  # steps before a capture: DDP rebuilds its buckets in the first ones


class GraphStep:
    """A `Step` captured as CUDA graphs, one for each batch size of a DeviceLoader.

    Args:
        step: the step to capture. All its work must be queued on the current stream, which must not
            be the default stream (`Runtime.side_stream`).
        loader: gathers the batches, as a part of each graph.

    Attributes:
        rates: learning rate of each group of the optimizer's parameters on the device, [groups],
            read by every replay.
        graphs: the captured graph of each batch size, by the number of samples in the GLOBAL batch.
        timer: of the work of `timed`; None: it is not timed.
        timed: the graph of the largest batch size again, with the events of the timer.
        attributes: numbers and texts of model and loss at the capture.
    """

    def __init__(self, step: Step, loader: DeviceLoader):
        self.step = step
        self.loader = loader
        # its kernels read the rate in float32
        fused = any(group.get("fused") for group in step.optimizer.param_groups)
        self.rates = torch.zeros(
            len(step.optimizer.param_groups),
            device=step.strategy.device,
            dtype=torch.float32 if fused else None,
        )
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.timer: EventTimer | None = None
        self.timed: dict[int, torch.cuda.CUDAGraph] = {}
        self.attributes = attributes_of(step.strategy)

    def capture(self, first_steps: AbstractContextManager[object]) -> None:
        """Warm up, then capture a graph for each batch size. Collective.

        Args:
            first_steps: context of the first steps, of the largest batch size, which compile and
                choose kernels.

        Raises:
            RuntimeError: the step makes the host wait for the GPU, which no graph can.
        """
        self.loader.set_epoch(1)
        largest, *others = sorted(set(self.loader.counts()), reverse=True)
        # Backward in this thread, too: cuDNN keeps its choice of kernels for each thread.
        with self._rate_on_device(), torch.autograd.set_multithreading_enabled(False):
            with first_steps:
                warm_up(self.step, partial(self._first_batch, largest), WARM_UP)
            for global_size in others:
                warm_up(self.step, partial(self._first_batch, global_size), WARM_UP)
            self._require_capturable(self._first_batch(largest))
            self.attributes = attributes_of(self.step.strategy)
            pool = torch.cuda.graph_pool_handle()
            for global_size in (largest, *others):
                self.graphs[global_size] = self._captured(global_size, pool)
            timer = self.step.strategy.timer
            if isinstance(timer, EventTimer) and timer.works_in_graphs:
                self.timer = timer
                with timer.in_graph():
                    self.timed[largest] = self._captured(largest, pool)

    def _captured(self, global_size: int, pool: Any) -> torch.cuda.CUDAGraph:
        """Return the graph of a step. Collective."""
        return captured(lambda: self.step.compute(self.gather(global_size)), pool)

    def _require_capturable(self, batch: Batch) -> None:
        """Compute a step, undo it, and check that a graph can repeat it. Collective.

        A step in which the host waits for the GPU would fail in the capture, too, but with a
        message about the capture, and it would leave torch's generators in it. One that changes
        something on the host would compute something else than its replays.

        Raises:
            RuntimeError: a rank cannot capture it; on all ranks, because none may capture what the
                others do not.
        """
        strategy = self.step.strategy
        with unchanged(self.step), waits_for_gpu() as places:
            before = HostState.of(strategy)
            self.step.compute(batch)
            changed = before.difference(HostState.of(strategy))
        problems = [f"waits for the GPU at {place}" for place in places[:1]]
        problems += [f"{changed}, which a CUDA graph would not repeat"] if changed else []
        problem = strategy.runtime.gather_and_decide("capture", problems, first_problem)
        if problem:
            raise RuntimeError(problem)

    @contextmanager
    def _rate_on_device(self) -> Generator[None]:
        """Let the optimizer read its learning rates from `rates`, as every replay does."""
        groups = self.step.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, self.rates.unbind(), strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def batches(self, loader: Loader) -> Iterator[int]:
        """Yield the sizes of the epoch's remaining batches, then draw the next sample order.

        A callback of the user may have changed a number of the model since the capture. From then
        on the steps run in eager mode.
        """
        strategy = self.step.strategy
        own_change = difference_of(self.attributes, attributes_of(strategy))
        # none may replay the collectives of a graph that another rank has left
        changed = strategy.runtime.gather_and_decide(
            "attributes", own_change, lambda changes: next(filter(None, changes), "")
        )
        if changed and self.graphs:
            log.warning(
                f"{changed} has changed since the step was captured as a CUDA graph: steps run in "
                "eager mode from now on"
            )
            self.graphs.clear()
            self.timed.clear()
        loader.start_epoch()
        yield from loader.counts()
        loader.prefetch_epoch()

    def __call__(self, batch: int | Batch) -> None:
        """Replay the graph for a number of samples.

        Compute a batch, which a hook has already gathered, in eager mode.
        """
        if isinstance(batch, Batch):
            self.step(batch)
        elif batch in self.graphs:
            self._set_rates([group["lr"] for group in self.step.optimizer.param_groups])
            self.step.prepare()
            self.compute(batch)
            self.step.advance()
        # a batch size that only occurs after resuming from a checkpoint with another batch size
        else:
            self.step(self.gather(batch))

    def _set_rates(self, rates: list[float]) -> None:
        """Queue the writing of the groups' learning rates, by one call for all of them."""
        if len({*rates}) == 1:
            self.rates.fill_(rates[0])
        else:
            # the copy of so few bytes begins at once, so that their memory is not needed any more
            self.rates.copy_(torch.tensor(rates, dtype=self.rates.dtype), non_blocking=True)

    def compute(self, global_size: int) -> None:
        """Queue the work of a step on the next batch, which has this number of samples."""
        if self.timer is not None and self.timer.is_due() and global_size in self.timed:
            self.timed[global_size].replay()
            self.timer.replayed()
            return
        self.graphs[global_size].replay()

    def gather(self, batch: int) -> Batch:
        """Return the next batch, which has this number of samples in the GLOBAL batch."""
        return self.loader.next_batch(batch)

    def _first_batch(self, global_size: int) -> Batch:
        self.loader.start_epoch()
        return self.gather(global_size)


def first_problem(problems: list[list[str]]) -> str:
    """Return why the first rank that has a problem cannot capture the step; "" if none has.

    Args:
        problems: of each rank, in order of rank.
    """
    for rank, texts in enumerate(problems):
        for text in texts:
            return f"the step {text} on rank {rank}"
    return ""


def captured(work: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Return a graph of the work that a function queues on the current stream.

    Args:
        work: called once; what it queues is captured and not executed.
        pool: memory of the graph, from torch.cuda.graph_pool_handle (torch does not export its
            type).
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as NCCL's, may call CUDA meanwhile.
    with torch.cuda.graph(
        graph, pool, torch.cuda.current_stream(), capture_error_mode="thread_local"
    ):
        work()
    return graph


def warm_up(step: Step, batch: Callable[[], Batch], times: int) -> None:
    """Run steps that compile, choose kernels and allocate everything, then restore the state.

    Collective.

    Args:
        batch: returns a batch, of the same size at every call.
        times: number of steps.
    """
    with unchanged(step):
        # Kernels are timed in one micro-batch without collectives, which would occupy a part of the
        # GPU meanwhile.
        inputs, targets, global_size = step.mixed(batch())
        accumulate = step.options.accumulate
        step.strategy.begin_batch(global_size, accumulate)
        with step.strategy.no_sync():
            first = chunk((inputs, targets), accumulate)[0]
            num_valid = min(step.strategy.valid_samples(global_size), size(first))
            # another divisor would compile the loss again
            step.strategy.add_gradient(*first, num_valid, step.strategy.divisor(global_size))
        step.zero_grad()
        for _ in range(times):
            step.compute(batch())


@contextmanager
def unchanged(step: Step) -> Generator[None]:
    """Restore the state of the training, in place, when the body ends.

    That is weights, their averages, the buffers of model and loss and the numbers that they keep as
    attributes, the optimizer's state and the running sums.

    Optimizer state that the body created is set to zero, the initial state of SGD and Adam.
    """
    strategy = step.strategy
    attributes = attributes_of(strategy)
    buffers = strategy.buffers()
    optimizer = step.optimizer
    averages = step.ema.state if step.ema else ()
    scale = strategy.loss_scale
    scales = scale.state if scale else ()
    sums = step.running_sums.state
    with_value = [buffer for buffer in buffers.values() if buffer is not None]
    tensors = [*strategy.module.parameters(), *with_value, *averages, *sums, *scales]
    before = [tensor.detach().clone() for tensor in tensors]
    moments = {
        (parameter, key): value.clone() for parameter, key, value in state_tensors(optimizer)
    }

    try:
        yield
    finally:  # an option that speed=auto has chosen may fail in the body
        for name, root in strategy.roots.items():
            restore_attributes(root, attributes[name])
        for name, buffer in strategy.buffers().items():
            if name in buffers and buffer is not buffers[name]:
                replace_buffer_of(strategy.roots, name, buffers[name])
        with torch.no_grad():
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
            for parameter, key, value in state_tensors(optimizer):
                old = moments.get((parameter, key))
                if old is None:
                    value.zero_()
                else:
                    value.copy_(old)
