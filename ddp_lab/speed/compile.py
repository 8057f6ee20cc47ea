"""torch.compile of a training step, for the shape of its full batches. Other batches and evaluation run in eager mode."""

import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch

from ddp_lab.data.loader import DeviceLoader
from ddp_lab.observe.log import log
from ddp_lab.speed.convolution import pad_convolutions
from ddp_lab.strategies.compilation import CompileFn, compile_passes
from ddp_lab.training.step import Step
from ddp_lab.world.process import REQUESTS

# Inductor's combo kernels: independent small kernels run as one, for example the casts of the weights to bf16.
# Reductions are excluded, because with them a step took 3 % longer (docs/log/benchmarks.md).
COMBO = {"combo_kernels": True, "combo_kernels_pointwise_only": True}
# Without this option Inductor returns to channels first if all convolutions that it compiles have at most 64 channels (LeNet,
# or ResNet's first blocks), and copies the gradients of the largest activations.
CHANNELS_LAST = {"force_layout_optimization": True}
RECOMPILE_LIMIT = 64  # torch's default is 8; the pieces of a model (`compile_passes`) count as one function with other shapes


def compile_step(step: Step, loader: DeviceLoader | None, channels_last: bool) -> str:
    """Let torch.compile compile a step, except its collectives, when it is first called. On a GPU, pad convolutions.

    Args:
        step: the step to compile, in place.
        loader: loader of a step that will be captured. It is compiled, too, and so are the optimizer and the running sums
            (`Step.compile`). None: the step will be called with batches, and these three remain in eager mode.
        channels_last: whether the model is in the channels-last memory format.

    Returns:
        What will be compiled, for the log.
    """
    # With what earlier jobs of this process left, torch 2.11 failed to compile an optimizer with two parameter groups
    # ("SpeculationLog diverged").
    torch.compiler.reset()
    options = COMBO | (CHANNELS_LAST if channels_last else {})
    compile_fn = cast(CompileFn, partial(torch.compile, dynamic=False, options=cast(dict[str, Any], options)))
    if step.strategy.device.type == "cuda":
        pad_convolutions(step.strategy.module)
    what = compile_passes(step.strategy, compile_fn)
    if loader is not None:
        loader.compile(compile_fn)
        step.compile(compile_fn)
    return f"compiling the training step: {what}"


@contextmanager
def compiling(what: str) -> Generator[None]:
    """Let the first steps of a compiled step, in the body, compile it; shapes that come later run in eager mode.

    The compilers, processes that this thread starts, do not receive the signals that a scheduler or a terminal sends to a whole
    launch: without one, this process would fail or wait forever instead of saving a checkpoint.

    Args:
        what: description of the work, which takes seconds to minutes, for the log.
    """
    log.info(f"{what} ...")
    start, before = time.perf_counter(), signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        # torch has no public form of the recompile limit.
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):  # pyright: ignore[reportPrivateUsage]
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    torch.compiler.set_stance("eager_on_recompile")  # until `backend_flags` ends
    log.info(f"{what}: took {time.perf_counter() - start:.1f} s")
