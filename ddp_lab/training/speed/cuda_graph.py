"""A complete training step as one CUDA graph: gather, forward, backward, all-reduce, optimizer.

In eager mode a step of LeNet takes the host ten times as long as the GPU. A graph is captured once and replayed by one call.
The values that change from step to step, the batch and the learning rate, are read from fixed addresses in memory.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from operator import call
from typing import Any, cast

import torch

from ddp_lab.data.loaders import DeviceLoader
from ddp_lab.data.sharding import Batch, Turn
from ddp_lab.strategies.compilation import Fuse
from ddp_lab.training.speed.convolution import pad_convolutions
from ddp_lab.training.speed.kernel_choice import Thread, capturing, fastest_thread
from ddp_lab.training.speed.notice import working
from ddp_lab.training.speed.switches import compiling
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
        self.rate = torch.zeros((), device=step.strategy.device)
        self.graphs: dict[Turn, torch.cuda.CUDAGraph] = {}

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return self.step.lr

    def capture(self, choosing: float, first: str) -> None:
        """Warm up, then capture a graph for each batch size. Collective; called within `PerformanceOptions.switches`.

        Args:
            choosing: seconds in which cuDNN's choice of kernels is repeated in new threads; 0 keeps its first choice.
            first: text of the notice about the first steps, which compile or warm up.
        """
        self.loader.set_epoch(1)
        turns = sorted(set(self.loader.turns()), reverse=True)
        groups = self.step.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = self.rate  # read by every replay
        with torch.autograd.set_multithreading_enabled(False):  # backward uses its caller's thread and its kernels
            # Warm up in this thread first: torch.compile compiles only in the thread that imported it (asserted in torch 2.11).
            with working(first), compiling():
                warm_up(self.step, [partial(self._first_batch, turns[0])], WARM_UP)
            self.thread: Thread = call  # an attribute, because the thread must live as long as its kernels are used
            if choosing:
                with working("choosing cuDNN's kernels"), unchanged(self.step):
                    self.thread = fastest_thread(partial(try_out, self.step, self._first_batch(turns[0])), choosing)
            with working("capturing the training step as a CUDA graph"):
                self.thread(partial(self._capture, turns))
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _capture(self, turns: list[Turn]) -> None:
        warm_up(self.step, [partial(self._first_batch, turn) for turn in turns], WARM_UP)
        pool = torch.cuda.graph_pool_handle()
        for turn in turns:
            self.graphs[turn] = torch.cuda.CUDAGraph()
            with capturing(self.graphs[turn], pool):
                self.step.compute(self.gather(turn))

    def batches(self, loader: DeviceLoader) -> Iterator[Turn]:
        """Yield the sizes of the remaining batches of the epoch, then draw the next epoch's sample order."""
        loader.deal()
        yield from loader.turns()
        loader.look_ahead()

    def __call__(self, turn: Turn | Batch) -> None:
        """Replay the graph of a turn. Compute a batch, which `Fault` has already gathered, in eager mode."""
        if isinstance(turn, Batch):
            self.step(turn)
        elif turn in self.graphs:
            self.rate.fill_(self.step.optimizer.param_groups[0]["lr"])
            self.step.prepare()
            self.graphs[turn].replay()
            self.step.advance()
        else:  # a batch size that only occurs after resuming from a checkpoint with another batch size
            self.step(self.gather(turn))

    def gather(self, turn: Turn) -> Batch:
        """Return the next batch, which has the sizes `turn`."""
        return Batch(*self.loader.take(turn.size), turn.count)

    def _first_batch(self, turn: Turn) -> Batch:
        self.loader.deal()
        return self.gather(turn)


# Inductor's combo kernels: independent small kernels run as one, for example the casts of the weights to bf16.
# Reductions are excluded, because with them a step took 3 % longer (docs/benchmarks-log.md).
COMBO = {"combo_kernels": True, "combo_kernels_pointwise_only": True}
# With `compile=tuned`, torch.compile times kernels for matrix multiplications and convolutions, and block sizes of fused ones.
TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
# Without this option Inductor returns to channels first if all convolutions that it compiles have at most 64 channels (LeNet,
# or ResNet's first blocks), and copies the gradients of the largest activations.
CHANNELS_LAST = {"force_layout_optimization": True}


def compile_step(step: Step, loader: DeviceLoader | None, tuned: bool, channels_last: bool) -> str:
    """Compile a step, except its collectives, for the shape of the first batch. On a GPU, pad the model's convolutions.

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


def warm_up(step: Step, batches: list[Callable[[], Batch]], times: int) -> None:
    """Run steps that compile, tune and allocate everything, and restore the state after them. Collective.

    Args:
        batches: one function for each batch size, which returns a batch.
        times: number of steps for each batch size, after one `try_out`.
    """
    with unchanged(step):
        for batch in batches:
            try_out(step, batch())
            for _ in range(times):
                step.compute(batch())


def try_out(step: Step, batch: Batch) -> None:
    """Run forward and backward of one micro-batch, in which kernels are timed and chosen, without summing gradients.

    A collective occupies a part of the GPU until the slowest rank arrives, so kernels timed meanwhile would appear too slow.
    """
    inputs, targets, count = step.mixed(batch)
    with step.strategy.no_sync():
        step.strategy.add_gradient(inputs.chunk(step.accumulate)[0], targets.chunk(step.accumulate)[0], count)
    step.optimizer.zero_grad()


@contextmanager
def unchanged(step: Step) -> Generator[None]:
    """Restore weights, buffers, their averages, the optimizer's state and the tally, in place, when the body ends.

    Optimizer state that the body created is set to zero, the initial state of SGD and Adam.
    """
    module, optimizer = step.strategy.module, step.optimizer
    averages = step.ema.averages.values() if step.ema else ()
    held = [*module.parameters(), *module.buffers(), *averages, *step.tally.state]
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
    """Yield the parameter, the name and the value of each tensor of the optimizer's state."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield parameter, key, value
