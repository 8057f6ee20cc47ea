"""Choosing cuDNN's kernels for a captured step: cuDNN chooses several times, and the fastest choice is kept.

For each convolution and thread, cuDNN keeps the kernel that was the fastest in ONE run of each. One run is a noisy
measurement: LeNet's forward and backward take 284 to 315 us, depending on the choice (an H200, docs/benchmarks-log.md).
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from operator import call
from typing import Any

import torch

MOST_THREADS = 16  # each choosing thread keeps a cuBLAS workspace allocated, 32 MiB on an H200

Thread = Callable[[Callable[[], Any]], Any]  # calls a function in some thread; `operator.call`: in the current one


class NewThread:
    """A thread that uses the current thread's device and stream, and in which cuDNN chooses its kernels anew."""

    def __init__(self):
        stream = torch.cuda.current_stream()

        def initialize() -> None:  # both settings belong to the new thread and end with it
            torch.cuda.set_stream(stream)
            torch.autograd.set_multithreading_enabled(False)

        self.executor = ThreadPoolExecutor(1, initializer=initialize)

    def __call__(self, task: Callable[[], Any]) -> Any:
        return self.executor.submit(copy_context().run, task).result()  # newer torch keeps its options in the context

    def close(self) -> None:
        self.executor.shutdown()


def quickest(graphs: list[torch.cuda.CUDAGraph], rounds: int = 5, replays: int = 20) -> int:
    """Return the index of the fastest graph, by the median over rounds, because a GPU is faster for a while after idling."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    milliseconds: list[list[float]] = [[] for _ in graphs]
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


def fastest_thread(work: Callable[[], None], seconds: float) -> Thread:
    """Return the thread whose kernels are the fastest for `work`: the current one, which has chosen already, or a new one.

    The backward pass must run in the thread that calls it (`torch.autograd.set_multithreading_enabled(False)`).

    Args:
        work: queues work that a CUDA graph can capture, without collectives, because each rank chooses for itself.
        seconds: time in which new threads are started; the last one is completed.
    """
    threads: list[Thread] = [call]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and len(threads) < MOST_THREADS:
        thread = NewThread()
        thread(work)
        threads.append(thread)
    pool = torch.cuda.graph_pool_handle()

    def capture() -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, pool):
            work()
        return graph

    fastest = threads[quickest([thread(capture) for thread in threads])]  # sequentially: they share the pool's memory
    for thread in threads:
        if isinstance(thread, NewThread) and thread is not fastest:
            thread.close()
    return fastest


def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> AbstractContextManager[None]:
    """Return a context that captures the current thread's work on the current stream.

    Args:
        pool: of torch.cuda.graph_pool_handle, whose type torch does not export; None: a pool of its own.
    """
    return torch.cuda.graph(graph, pool, torch.cuda.current_stream(), capture_error_mode="thread_local")
