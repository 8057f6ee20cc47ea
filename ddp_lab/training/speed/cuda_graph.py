"""A whole training step as one CUDA graph: gather, forward, backward, all-reduce, optimizer.

Launched kernel by kernel, a step of LeNet takes the host ten times as long as the GPU. A graph is recorded once and
replayed by one call; what changes from step to step (the batch, the learning rate) it reads from memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import call

import torch

from ddp_lab.data.loaders import DeviceLoader
from ddp_lab.data.sharding import Batch, Turn
from ddp_lab.training.speed.convolution import pad_convolutions
from ddp_lab.training.speed.kernel_choice import fastest_thread, recording
from ddp_lab.training.speed.notice import working
from ddp_lab.training.speed.switches import compiling
from ddp_lab.training.step import Step

WARM_UP = 11  # steps before a recording: DDP lays out its buckets anew in the first ones


class GraphStep:
    """A `Step` for the turns of a DeviceLoader.

    Args:
        step: all of it must run on the current stream, which must not be the default one (`Runtime.side_stream`).
    """

    def __init__(self, step: Step, loader: DeviceLoader):
        self.step, self.loader, self.tally = step, loader, step.tally
        self.tally.in_graph = True
        self.rate = torch.zeros((), device=step.strategy.device)
        self.graphs: dict[Turn, torch.cuda.CUDAGraph] = {}

    @property
    def lr(self) -> float:
        return self.step.lr

    def record(self, choosing: float, first: str) -> None:
        """Warms up, then captures a graph for each size of a batch, within `PerformanceOptions.switches`. Collective.

        Args:
            choosing: seconds in which cuDNN's choice of kernels is repeated, in new threads; 0: its first one is taken.
            first: what the first steps do, for the notice about them: compile, or warm up.
        """
        self.loader.set_epoch(1)
        turns = sorted(set(self.loader.turns()), reverse=True)
        groups = self.step.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = self.rate  # read at every replay
        with torch.autograd.set_multithreading_enabled(False):  # backward runs where it is called, with that thread's kernels
            # Here, too: torch.compile asks for what only the thread has that imported it (an assertion of torch 2.11).
            with working(first), compiling():
                warm_up(self.step, [partial(self._first_batch, turns[0])], WARM_UP)
            self.thread = call  # kept: it keeps the kernels
            if choosing:
                with working("choosing cuDNN's kernels"), unchanged(self.step):
                    self.thread = fastest_thread(partial(try_out, self.step, self._first_batch(turns[0])), choosing)
            with working("capturing the training step as a CUDA graph"):
                self.thread(partial(self._record, turns))
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _record(self, turns: list[Turn]) -> None:
        warm_up(self.step, [partial(self._first_batch, turn) for turn in turns], WARM_UP)
        pool = torch.cuda.graph_pool_handle()
        for turn in turns:
            self.graphs[turn] = torch.cuda.CUDAGraph()
            with recording(self.graphs[turn], pool):
                self.step.compute(self.gather(turn))

    def batches(self, loader: DeviceLoader) -> Iterator[Turn]:
        loader.deal()
        yield from loader.turns()
        loader.look_ahead()

    def __call__(self, turn: Turn | Batch) -> None:
        """Replay the graph of a turn. A batch, gathered before, is computed in eager mode."""
        if turn in self.graphs:
            self.rate.fill_(self.step.optimizer.param_groups[0]["lr"])
            self.graphs[turn].replay()
            self.step.advance()
        else:  # after a resume with another batch size there may be one; its kernels are chosen when it comes
            self.step(turn if isinstance(turn, Batch) else self.gather(turn))

    def gather(self, turn: Turn) -> Batch:
        """Return the next batch, whose size is the turn's, in place of replaying it."""
        return Batch(*self.loader.take(turn.size), turn.count)

    def _first_batch(self, turn: Turn) -> Batch:
        self.loader.deal()
        return self.gather(turn)


# Inductor's combo kernels: small ones that do not wait for each other run as one, casts of the weights to bf16 for example.
# Not reductions: with them a step took 3 % longer (docs/benchmarks-log.md).
COMBO = {"combo_kernels": True, "combo_kernels_pointwise_only": True}
# What `compile=tuned` has torch.compile try out: kernels for products and convolutions, and every fused kernel's shape.
TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
# Where all convolutions of what it compiles have at most 64 channels (LeNet, or a piece with ResNet's first blocks) Inductor
# would go back to channels first, and copy the gradients of the largest activations on the way.
CHANNELS_LAST = {"force_layout_optimization": True}


def compile_step(step: Step, loader: DeviceLoader | None, tuned: bool, channels_last: bool) -> None:
    """Everything of a step but its collectives. What is compiled is the first batch's shape; other sizes, and
    evaluation, run as they are: compiling them would take as long again. On a GPU it pads the model's convolutions.

    Args:
        loader: of a step that is to be captured. Else its batches come from outside, and the optimizer and the tally are left
            as they are (`Step.compile`).
        tuned: tries out more kernels, which takes minutes.
        channels_last: the model is in that format, and stays in it.
    """
    options = COMBO | (TUNED if tuned else {}) | (CHANNELS_LAST if channels_last else {})
    fuse = partial(torch.compile, dynamic=False, options=options)
    if step.strategy.device.type == "cuda":
        pad_convolutions(step.strategy.module)
    step.strategy.compile(fuse)
    if loader is not None:
        loader.compile(fuse)
        step.compile(fuse)


def warm_up(step: Step, batches: list[Callable[[], Batch]], times: int) -> None:
    """Steps that do not count: behind them all is compiled, tuned and allocated, and the state is what it was. Collective."""
    with unchanged(step):
        for batch in batches:
            try_out(step, batch())
            for _ in range(times):
                step.compute(batch())


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
