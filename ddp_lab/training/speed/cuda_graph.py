"""A complete training step as one CUDA graph: gather, forward, backward, all-reduce, optimizer.

In eager mode a step of LeNet takes the host ten times as long as the GPU. A graph is captured once and replayed by one call.
The values that change from step to step, the batch and the learning rate, are read from fixed addresses in memory.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch

from ddp_lab.data.batch import Batch, BatchSize
from ddp_lab.data.loader import DeviceLoader, Loader
from ddp_lab.strategies.compilation import Fuse
from ddp_lab.training.speed.convolution import pad_convolutions
from ddp_lab.training.speed.notice import working
from ddp_lab.training.speed.switches import compiling, end_choosing
from ddp_lab.training.speed.warm_up import refusing_to_wait, unchanged, warm_up
from ddp_lab.training.step import Step

WARM_UP = 11  # steps before a capture: DDP rebuilds its buckets in the first ones


class GraphStep:
    """A `Step` captured as CUDA graphs, one for each batch size of a DeviceLoader.

    Args:
        step: the step to capture. All its work must be queued on the current stream, which must not be the default stream
            (`Runtime.side_stream`).
        loader: gathers the batches, as a part of each graph.

    Attributes:
        rate: learning rate on the device, [], read by every replay.
        graphs: the captured graph of each batch size.
    """

    def __init__(self, step: Step, loader: DeviceLoader):
        self.step, self.loader, self.tally = step, loader, step.tally
        self.tally.in_graph = True
        fused = any(group.get("fused") for group in step.optimizer.param_groups)  # its kernels read the rate in float32
        self.rate = torch.zeros((), device=step.strategy.device, dtype=torch.float32 if fused else None)
        self.graphs: dict[BatchSize, torch.cuda.CUDAGraph] = {}

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return self.step.lr

    def capture(self, compiled: bool, first: str, checked: bool = False) -> None:
        """Warm up, then capture a graph for each batch size. Collective; called within `PerformanceOptions.switches`.

        Args:
            compiled: whether the step is compiled.
            first: text of the notice about the first steps, which compile or warm up.
            checked: whether a step that waits for the GPU raises an error before the capture begins.
        """
        self.loader.set_epoch(1)
        sizes = sorted(set(self.loader.batch_sizes()), reverse=True)
        # Backward in this thread, too: cuDNN keeps its choice of kernels for each thread.
        with self._rate_on_device(), torch.autograd.set_multithreading_enabled(False):
            with working(first), compiling() if compiled else nullcontext():
                warm_up(self.step, [partial(self._first_batch, sizes[0])], WARM_UP)
            with working("capturing the training step as a CUDA graph"):
                end_choosing()
                self._capture(sizes, checked)

    @contextmanager
    def _rate_on_device(self) -> Generator[None]:
        """Let the optimizer read its learning rate from `rate`, as every replay does."""
        groups = self.step.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = self.rate
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _capture(self, sizes: list[BatchSize], checked: bool) -> None:
        warm_up(self.step, [partial(self._first_batch, size) for size in sizes[1:]], WARM_UP)
        if checked:
            batch = self._first_batch(sizes[0])
            with unchanged(self.step), refusing_to_wait():
                self.step.compute(batch)
        pool = torch.cuda.graph_pool_handle()
        for size in sizes:
            self.graphs[size] = torch.cuda.CUDAGraph()
            # Other threads, such as NCCL's, may call CUDA during the capture.
            with torch.cuda.graph(self.graphs[size], pool, torch.cuda.current_stream(), capture_error_mode="thread_local"):
                self.step.compute(self.gather(size))

    def seconds(self, most: int) -> float:
        """Return the duration of a step of the largest batch size. Collective.

        Args:
            most: number of steps that are timed, if an epoch has as many.
        """
        self.loader.set_epoch(1)
        sizes = list(self.loader.batch_sizes())
        times = min(most, sizes.count(max(sizes)))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with unchanged(self.step):
            for _ in range(2):  # the first time is a warm-up
                self.loader.start_epoch()
                start.record()
                for _ in range(times):
                    self.graphs[max(sizes)].replay()
                end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1000 / times

    def batches(self, loader: Loader) -> Iterator[BatchSize]:
        """Yield the sizes of the remaining batches of the epoch, then draw the next epoch's sample order."""
        loader.start_epoch()
        yield from loader.batch_sizes()
        loader.prefetch_epoch()

    def __call__(self, size: BatchSize | Batch) -> None:
        """Replay the graph of a batch size. Compute a batch, which `Fault` has already gathered, in eager mode."""
        if isinstance(size, Batch):
            self.step(size)
        elif size in self.graphs:
            self.rate.fill_(self.step.optimizer.param_groups[0]["lr"])
            self.step.prepare()
            self.graphs[size].replay()
            self.step.advance()
        else:  # a batch size that only occurs after resuming from a checkpoint with another batch size
            self.step(self.gather(size))

    def gather(self, size: BatchSize) -> Batch:
        """Return the next batch, which has these sizes."""
        return self.loader.next_batch(size)

    def _first_batch(self, size: BatchSize) -> Batch:
        self.loader.start_epoch()
        return self.gather(size)


# Inductor's combo kernels: independent small kernels run as one, for example the casts of the weights to bf16.
# Reductions are excluded, because with them a step took 3 % longer (docs/log/benchmarks.md).
COMBO = {"combo_kernels": True, "combo_kernels_pointwise_only": True}
# With `compile=tuned`, torch.compile times kernels for matrix multiplications and convolutions, and block sizes of fused ones.
TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
# Without this option Inductor returns to channels first if all convolutions that it compiles have at most 64 channels (LeNet,
# or ResNet's first blocks), and copies the gradients of the largest activations.
CHANNELS_LAST = {"force_layout_optimization": True}


def compile_step(step: Step, loader: DeviceLoader | None, tuned: bool, channels_last: bool) -> str:
    """Compile a step, except its collectives, for the shape of the first batch. On a GPU, pad the channels of convolutions.

    Other batch sizes and evaluation run in eager mode, because compiling them would take as long again.

    Args:
        step: the step to compile, in place.
        loader: loader of a step that will be captured. It is compiled, too, and so are the optimizer and the tally
            (`Step.compile`). None: the step will be called with batches, and these three remain in eager mode.
        tuned: whether to time more kernels, which takes minutes.
        channels_last: whether the model is in the channels-last memory format.

    Returns:
        What of the model is compiled, for the log.
    """
    options = COMBO | (TUNED if tuned else {}) | (CHANNELS_LAST if channels_last else {})
    fuse = cast(Fuse, partial(torch.compile, dynamic=False, options=cast(dict[str, Any], options)))
    if step.strategy.device.type == "cuda":
        pad_convolutions(step.strategy.module)
    what = step.strategy.compile(fuse)
    if loader is not None:
        loader.compile(fuse)
        step.compile(fuse)
    return what
