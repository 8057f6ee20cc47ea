"""Which kernels cuDNN takes for a recorded step: it chooses several times, and the fastest choice is kept.

Of each convolution cuDNN keeps, for each thread, the kernel that was the fastest in ONE run of all it has. That is little to
judge by: LeNet's forward and backward take 284 to 315 us with what it chooses (an H200, docs/benchmarks-log.md).
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

MOST_THREADS = 16  # that choose: each leaves cuBLAS's workspace behind, 32 MiB on an H200

Thread = Callable[[Callable[[], Any]], Any]  # calls what it gets, somewhere; `operator.call` here


class NewThread:
    """A thread for the device and stream of this one, in which kernels are chosen anew."""

    def __init__(self):
        stream = torch.cuda.current_stream()

        def settle() -> None:  # both are this thread's own settings and end with it
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


def fastest_thread(work: Callable[[], None], seconds: float) -> Thread:
    """That with the fastest kernels for `work`: this one, where they are chosen already, or one of those that could begin to
    choose within so many seconds. Backward must run where it is called (`torch.autograd.set_multithreading_enabled`).

    Args:
        work: on the device; what a CUDA graph can hold, and without collectives, because each rank chooses for itself.
    """
    threads, end = [call], time.perf_counter() + seconds
    while time.perf_counter() < end and len(threads) < MOST_THREADS:
        threads.append(NewThread())
        threads[-1](work)
    pool = torch.cuda.graph_pool_handle()

    def sketch() -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with recording(graph, pool):
            work()
        return graph

    fastest = threads[quickest([thread(sketch) for thread in threads])]  # in turn: they share the pool's memory
    for thread in threads[1:]:
        if thread is not fastest:
            thread.close()
    return fastest


def recording(graph: torch.cuda.CUDAGraph, pool: tuple | None = None) -> AbstractContextManager:
    return torch.cuda.graph(graph, pool, torch.cuda.current_stream(), capture_error_mode="thread_local")
