"""Global settings of torch that a fast step needs. Each applies within a `with` block and is restored after it."""

from collections.abc import Generator
from contextlib import contextmanager

import torch

# torch's default is 8. The pieces of a model (`Strategy.compile_pieces`) count as one function with different shapes.
RECOMPILE_LIMIT = 64


@contextmanager
def cudnn_benchmark() -> Generator[None]:
    """Let cuDNN time all its kernels for every new convolution and use the fastest."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, 0
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


@contextmanager
def eager_unless_compiled() -> Generator[None]:
    """Run shapes that are not compiled yet in eager mode. Only within `compiling`, new shapes are compiled.

    What was compiled before is forgotten: with what earlier jobs of this process left, torch 2.11 failed to compile an
    optimizer with two parameter groups ("SpeculationLog diverged").
    """
    torch.compiler.reset()
    # torch has no public form of the recompile limit.
    patch = torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT)  # pyright: ignore[reportPrivateUsage]
    with patch, torch.compiler.set_stance("eager_on_recompile"):
        yield


@contextmanager
def compiling() -> Generator[None]:
    """Let torch.compile compile new shapes again, in a block within `eager_unless_compiled`."""
    with torch.compiler.set_stance("default"):
        yield
