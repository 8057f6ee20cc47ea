"""A whole training step as one CUDA graph: gather, forward, backward, all-reduce, optimizer.

Launched kernel by kernel, a step of LeNet takes the host ten times as long as the GPU. A graph is recorded once and
replayed by one call; what changes from step to step (the batch, the learning rate) it reads from memory.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from functools import partial
from operator import call
from typing import Any

import torch

from ddp_lab.data.loaders import Batch, DeviceLoader, Turn
from ddp_lab.step import Step

WARM_UP = 11  # steps before a recording: DDP lays out its buckets anew in the first ones
MOST_THREADS = 16  # that choose kernels: each leaves cuBLAS's workspace behind, 32 MiB on an H200


class GraphStep:
    """A `Step` for the turns of a DeviceLoader.

    Args:
        step: all of it must run on the current stream, which must not be the default one.
    """

    def __init__(self, step: Step, loader: DeviceLoader):
        self.step, self.loader, self.tally = step, loader, step.tally
        self.tally.in_graph = True
        self.rate = torch.zeros((), device=step.strategy.device)
        self.graphs: dict[Turn, torch.cuda.CUDAGraph] = {}

    @property
    def lr(self) -> float:
        return self.step.lr

    def record(self, choosing: float) -> None:
        """Warms up, then records a graph for each size of a batch. Changes no state. Collective.

        Args:
            choosing: seconds in which cuDNN's choice of kernels is repeated, in new threads; 0: its first one is taken.
        """
        self.loader.set_epoch(1)
        turns = sorted(set(self.loader.turns()), reverse=True)
        groups = self.step.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = self.rate  # read at every replay
        with torch.autograd.set_multithreading_enabled(False):  # backward runs where it is called, with that thread's kernels
            # Here, too: torch.compile asks for what only the thread has that imported it (an assertion of torch 2.11).
            warm_up(self.step, [partial(self._first_batch, turns[0])], WARM_UP)
            self.thread = self._fastest_thread(turns[0], choosing) if choosing else call  # kept: it keeps the kernels
            self.thread(partial(self._record, turns))
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _fastest_thread(self, turn: Turn, seconds: float) -> "Thread":
        """That with the fastest kernels for forward and backward of a batch of this size: this one, or one of those that could
        begin to choose within so many seconds."""
        batch, pool = self._first_batch(turn), torch.cuda.graph_pool_handle()

        def sketch() -> torch.cuda.CUDAGraph:
            graph = torch.cuda.CUDAGraph()
            with recording(graph, pool):
                try_out(self.step, batch)
            return graph

        with unchanged(self.step):
            threads, end = [call], time.perf_counter() + seconds
            while time.perf_counter() < end and len(threads) < MOST_THREADS:
                threads.append(NewThread())
                threads[-1](partial(try_out, self.step, batch))
            fastest = quickest([thread(sketch) for thread in threads])  # one after the other: they share the pool's memory
        for thread in threads[1:]:
            if thread is not threads[fastest]:
                thread.close()
        return threads[fastest]

    def _record(self, turns: list[Turn]) -> None:
        warm_up(self.step, [partial(self._first_batch, turn) for turn in turns], WARM_UP)
        pool = torch.cuda.graph_pool_handle()
        for turn in turns:
            self.graphs[turn] = torch.cuda.CUDAGraph()
            with recording(self.graphs[turn], pool):
                self.step.compute(self._batch(turn))

    def batches(self, loader: DeviceLoader) -> Iterator[Turn]:
        loader.deal()
        yield from loader.turns()
        loader.look_ahead()

    def __call__(self, turn: Turn) -> None:
        if turn in self.graphs:
            self.rate.fill_(self.step.optimizer.param_groups[0]["lr"])
            self.graphs[turn].replay()
            self.step.advance()
        else:  # after a resume with another batch size there may be one; its kernels are chosen when it comes
            self.step(self._batch(turn))

    def poison(self, turn: Turn) -> None:
        """As a call, with images that are not numbers; kernel by kernel."""
        self.step.poison(self._batch(turn))

    def _first_batch(self, turn: Turn) -> Batch:
        self.loader.deal()
        return self._batch(turn)

    def _batch(self, turn: Turn) -> Batch:
        return Batch(*self.loader.take(turn.size), turn.count)


Thread = Callable[[Callable[[], Any]], Any]  # calls what it gets, somewhere; `operator.call` here


class NewThread:
    """A thread for the device and stream of this one, in which kernels of convolutions are chosen anew.

    Of each convolution cuDNN keeps, for each thread, the kernel that was the fastest in ONE run of all it has. That is little
    to judge by: LeNet's forward and backward take 284 to 315 us with what it chooses (an H200).
    """

    def __init__(self):
        stream = torch.cuda.current_stream()

        def settle() -> None:
            torch.cuda.set_stream(stream)
            torch.autograd.set_multithreading_enabled(False)

        self.executor = ThreadPoolExecutor(1, initializer=settle)

    def __call__(self, task: Callable[[], Any]) -> Any:
        return self.executor.submit(copy_context().run, task).result()  # newer torch keeps its options in the context

    def close(self) -> None:
        self.executor.shutdown()


def quickest(graphs: list[torch.cuda.CUDAGraph], rounds: int = 5, replays: int = 20) -> int:
    """Its place. By the median of some rounds, because a GPU that was idle runs faster for a while."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    milliseconds = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, taken in zip(graphs, milliseconds, strict=True):
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end))
    medians = [statistics.median(taken) for taken in milliseconds]
    return medians.index(min(medians))


def recording(graph: torch.cuda.CUDAGraph, pool: tuple | None = None) -> AbstractContextManager:
    return torch.cuda.graph(graph, pool, torch.cuda.current_stream(), capture_error_mode="thread_local")


# What `compile=tuned` has torch.compile try out: kernels for products and convolutions, and every fused kernel's shape.
TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
# Where all convolutions of what it compiles have at most 64 channels (LeNet, or a piece with ResNet's first blocks) Inductor
# would go back to channels first, and copy the gradients of the largest activations on the way.
CHANNELS_LAST = {"force_layout_optimization": True}


def compile_step(step: Step, loader: DeviceLoader | None, tuned: bool, channels_last: bool) -> None:
    """Everything of a step but its collectives. What is compiled is the first batch's shape; other sizes, and
    evaluation, run as they are: compiling them would take as long again.

    Args:
        loader: of a step that is to be recorded. Else its batches come from outside, and the optimizer is left as it is: the
            learning rate, a number there, would have it compiled anew at every step.
        tuned: tries out more kernels, which takes minutes.
        channels_last: the model is in that format, and stays in it.
    """
    torch.compiler.set_stance("default")
    options = (TUNED if tuned else {}) | (CHANNELS_LAST if channels_last else {})
    fuse = partial(torch.compile, dynamic=False, options=options)
    step.strategy.compile(fuse)
    if loader is not None:
        step.optimize = torch.compile(step.optimizer.step)
        loader.take, step.tally.add = fuse(loader.take), fuse(step.tally.add)


def warm_up(step: Step, batches: list[Callable[[], Batch]], times: int) -> None:
    """Steps that do not count: behind them all is compiled, tuned and allocated, and the state is what it was. Collective."""
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 0  # tries all it has for every convolution
    with unchanged(step):
        for batch in batches:
            try_out(step, batch())
            for _ in range(times):
                step.compute(batch())
            torch.compiler.set_stance("eager_on_recompile")


def try_out(step: Step, batch: Batch) -> None:
    """The first forward and backward, in which kernels are timed and chosen. No gradients are summed in it: a collective
    occupies a part of the GPU until the slowest rank is there, and kernels timed beside it would be misjudged."""
    inputs, targets, count = batch
    with step.strategy.no_sync():
        step.strategy.add_gradient(inputs.chunk(step.accumulate)[0], targets.chunk(step.accumulate)[0], count)
    step.optimizer.zero_grad()


@contextmanager
def unchanged(step: Step) -> Iterator[None]:
    """Puts weights, buffers, the optimizer's state and the tally back, in place. State that was not there yet becomes zeros,
    which is what SGD and Adam begin with."""
    module, optimizer = step.strategy.module, step.optimizer
    held = [*module.parameters(), *module.buffers(), *step.tally.state]
    before = [tensor.detach().clone() for tensor in held]
    moments = {(parameter, key): value.clone() for parameter, key, value in state_of(optimizer)}
    yield
    with torch.no_grad():
        for tensor, old in zip(held, before, strict=True):
            tensor.copy_(old)
        for parameter, key, value in state_of(optimizer):
            old = moments.get((parameter, key))
            value.zero_() if old is None else value.copy_(old)


def state_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield parameter, key, value
