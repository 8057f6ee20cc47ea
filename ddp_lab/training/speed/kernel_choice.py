"""Choice of cuDNN's kernels for a captured step: cuDNN chooses several times, and the fastest choice is kept.

For each convolution and thread, cuDNN runs every kernel ONCE and keeps the fastest. A single run is a noisy
measurement: LeNet's forward and backward take 284 to 315 us, depending on the choice (an H200, docs/log/benchmarks.md).
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any

import torch

MOST_THREADS = 16  # LeNet starts as many in CHOOSING seconds
# Milliseconds; a single run of the kernels of longer work is measurement enough. On one H200 four choices for ResNet-18 (3 ms)
# differed by 1 % and took 2.5 s each, sixteen for LeNet (0.2 ms) differed by 6 % and took 0.2 s each (torch 2.11, 2026-11-23).
LONGEST = 1.0
COMPARING = 500.0  # milliseconds in which the graphs are compared

Thread = Callable[[Callable[[], Any]], Any]  # calls a function in a certain thread; `operator.call` uses the current thread


class NewThread:
    """A thread with the device and stream of the current thread, in which cuDNN chooses its kernels again."""

    def __init__(self):
        stream = torch.cuda.current_stream()

        def initialize() -> None:  # both settings belong to the new thread and end with it
            torch.cuda.set_stream(stream)
            torch.autograd.set_multithreading_enabled(False)

        self.executor = ThreadPoolExecutor(1, initializer=initialize)

    def __call__(self, task: Callable[[], Any]) -> Any:
        """Run `task` in the thread, wait for it and return its result."""
        return self.executor.submit(copy_context().run, task).result()  # newer torch keeps its options in the context

    def close(self) -> None:
        """End the thread."""
        self.executor.shutdown()


def duration(work: Callable[[], None], times: int = 1) -> float:
    """Return how many milliseconds the device needs for `times` calls of `work`, which queues its work there."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def quickest(graphs: list[torch.cuda.CUDAGraph], rounds: int = 5) -> int:
    """Return the index of the graph with the shortest median time over all rounds, which take about COMPARING together.

    The rounds are needed because a GPU is faster for a while after it was idle.

    Args:
        graphs: at least one.
        rounds: number of measurements of each graph.
    """
    once = max(duration(graph.replay) for graph in graphs)
    replays = max(1, min(20, int(COMPARING / (rounds * len(graphs) * once))))
    milliseconds: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, taken in zip(graphs, milliseconds, strict=True):
            taken.append(duration(graph.replay, replays))
    medians = [statistics.median(taken) for taken in milliseconds]
    return medians.index(min(medians))


def fastest_thread(work: Callable[[], None], seconds: float) -> NewThread:
    """Return a new thread whose kernels are the fastest for `work`.

    torch keeps cuDNN's choices for each thread and never revises them. The current thread may have the first guesses of a step
    that was tried before. The backward pass must run in the thread that calls it
    (`torch.autograd.set_multithreading_enabled(False)`).

    Args:
        work: queues work that a CUDA graph can capture. It has no collectives, because each rank chooses for itself.
        seconds: how long new threads are started; a thread started in that time completes its work. One thread, which chooses
            when it is first used, if that is 0; one, too, if the graph of the work takes longer than LONGEST.
    """
    first = NewThread()
    if not seconds:
        return first
    pool = torch.cuda.graph_pool_handle()

    def capture() -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, pool):
            work()
        return graph

    run_in(first, work)  # a capture needs all memory that is created once
    graph = run_in(first, capture)
    graph.replay()  # the first replay also sends the graph to the device
    if duration(graph.replay) > LONGEST:
        return first
    threads, end = [first], time.perf_counter() + seconds
    while time.perf_counter() < end and len(threads) < MOST_THREADS:
        thread = NewThread()
        run_in(thread, work)
        threads.append(thread)
    # One after the other: they share the pool's memory.
    fastest = threads[quickest([graph, *(run_in(thread, capture) for thread in threads[1:])])]
    for thread in threads:
        if thread is not fastest:
            thread.close()
    return fastest


def run_in(thread: NewThread, task: Callable[[], Any]) -> Any:
    """Run `task` in a thread, then free the cuBLAS workspaces of all threads, 32 MiB each on an H200. Return the task's result.

    A capture after that takes its workspace from the graphs' pool, where it stays valid and is shared with the other graphs. A
    graph that was captured otherwise before must not be replayed again.
    """
    result = thread(task)
    torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage], torch has no public function
    return result


def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> AbstractContextManager[None]:
    """Return a context that captures the current thread's work on the current stream.

    Args:
        graph: where the work is captured.
        pool: memory pool from torch.cuda.graph_pool_handle (torch does not export its type); None gives the graph its own.
    """
    return torch.cuda.graph(graph, pool, torch.cuda.current_stream(), capture_error_mode="thread_local")
