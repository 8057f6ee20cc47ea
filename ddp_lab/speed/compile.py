"""torch.compile of a training step, for the shape of its full batches.

Other batches and evaluation run in eager mode.

torch.compile keeps what it has compiled with the code of a function, and uses it again where the
types, shapes and attributes are the same. The blocks of a Vision Transformer are equal, so all of
them are compiled in the time of one. The complete model would be one graph of all blocks. Only a
block's call is compiled: hooks of fully_shard run outside of it, and state dicts keep their names.
"""

import signal
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ddp_lab.config.errors import count
from ddp_lab.data.loader import DeviceLoader
from ddp_lab.models.blocks import kind
from ddp_lab.models.chain import Chain
from ddp_lab.observe.log import log
from ddp_lab.speed.convolution import pad_convolutions
from ddp_lab.strategies.base import Strategy
from ddp_lab.tasks.base import measure
from ddp_lab.training.step import Step
from ddp_lab.world.process import REQUESTS

# Inductor's combo kernels: independent small kernels run as one, for example the casts of the
# weights to bf16. Reductions are excluded, because with them a step took 3 % longer
# (docs/log/benchmarks.md).
COMBO = {"combo_kernels": True, "combo_kernels_pointwise_only": True}
# Without this option Inductor returns to channels first if all convolutions that it compiles have
# at most 64 channels (LeNet, or ResNet's first blocks), and copies the gradients of the largest
# activations.
CHANNELS_LAST = {"force_layout_optimization": True}
# torch's default is 8; the pieces of a model (`compile_passes`) count as one function with other
# shapes
RECOMPILE_LIMIT = 64


def compile_passes(strategy: Strategy, compile_fn: partial[Any]) -> str:
    """Compile forward, loss and backward, in place. Called after `Strategy.setup`.

    Where gradients are sent during the backward pass, the model is compiled in pieces: the
    gradients of a piece are complete when its own backward pass ends, so a bucket can be sent while
    the next piece computes. Kernels are not fused across a cut, which costs some time
    (docs/log/benchmarks.md).

    Returns:
        What of the model is compiled, for the log.
    """
    compiled_measure = compile_fn(measure)
    if strategy.head_losses is not None:
        strategy.head_losses.compile(compile_fn)
    model = strategy.module
    if strategy.compiled_by_block or repeats(model):
        strategy.use_compiled(compiled_measure)
        blocks = [block for block in model.children() if any(True for _ in block.parameters())]
        for block in blocks:
            block.compile(**compile_fn.keywords)
        where = f" on rank {strategy.runtime.rank}" if strategy.axes.get("pp", 1) > 1 else ""
        return (
            f"{count(len(blocks), 'block')} of {count(len(set(map(kind, blocks))), 'kind')}{where}"
        )

    if strategy.bucket_sizes:
        assert isinstance(model, Chain)  # `unsupported_options`
        strategy.use_compiled(compiled_measure)
        pieces = model.pieces(*strategy.bucket_sizes)
        model.execute_in(map(compile_fn, pieces))
        return f"the model in {count(len(pieces), 'piece')}"
    strategy.use_compiled(compiled_measure, compile_fn(model))
    return "the complete model"


def repeats(model: nn.Module) -> bool:
    """Return whether at least half of the model's blocks, and at least two, are of one kind.

    This is the case for a Vision Transformer, but not for ResNet-18, whose complete model compiles
    in seconds and is faster.
    """
    if not isinstance(model, Chain):
        return False
    most = max(Counter(map(kind, model.children())).values())
    return most >= 2 and 2 * most >= len(model)


@contextmanager
def compiling(step: Step, loader: DeviceLoader | None, channels_last: bool) -> Generator[None]:
    """Let torch.compile compile a step, except its collectives, in the body.

    Shapes that come later run in eager mode.

    On a GPU convolutions are padded, and cuDNN times all its kernels for every new convolution and
    uses the fastest. The compilers, processes that this thread starts, do not receive the signals
    that a scheduler or a terminal sends to a whole launch: without one, this process would fail or
    wait forever instead of saving a checkpoint.

    Args:
        step: the step to compile, in place. The body takes its first steps, which takes seconds to
            minutes.
        loader: loader of a step that will be captured. It is compiled, too, and so are the
            optimizer and the running sums (`Step.compile`). None: the step will be called with
            batches, and these three remain in eager mode.
        channels_last: whether the model is in the channels-last memory format.
    """
    # With what earlier jobs of this process left, torch 2.11 failed to compile an optimizer with
    # two parameter groups ("SpeculationLog diverged").
    torch.compiler.reset()
    options = COMBO | (CHANNELS_LAST if channels_last else {})
    compile_fn: partial[Any] = partial(
        torch.compile, dynamic=False, options=cast("dict[str, Any]", options)
    )
    if step.strategy.device.type == "cuda":
        pad_convolutions(step.strategy.module)

    activity = f"compiling the training step: {compile_passes(step.strategy, compile_fn)}"
    if loader is not None:
        loader.compile(compile_fn)
        step.compile(compile_fn)
    log.info(f"{activity} ...")
    start = time.perf_counter()
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    cudnn: Any = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit

    cudnn.benchmark = True
    cudnn.benchmark_limit = 0
    try:
        # torch has no public form of the recompile limit.
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):  # pyright: ignore[reportPrivateUsage]
            yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
    torch.compiler.set_stance("eager_on_recompile")  # until `backend_flags` ends
    log.info(f"{activity}: took {time.perf_counter() - start:.1f} s")
