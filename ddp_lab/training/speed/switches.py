"""torch's global switches that a fast step needs. Each holds within a `with` block and is restored after it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

RECOMPILE_LIMIT = (
    64  # torch's is 8; the pieces of a model (`Strategy.compile_pieces`) are one function to it, each of another shape
)


@contextmanager
def cudnn_benchmark() -> Iterator[None]:
    """Have cuDNN try all the kernels it has for every convolution that is new to it."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, 0
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


@contextmanager
def eager_unless_compiled() -> Iterator[None]:
    """Run what torch.compile has not compiled for these shapes in eager mode. Within `compiling`, it is compiled."""
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT), torch.compiler.set_stance("eager_on_recompile"):
        yield


@contextmanager
def compiling() -> Iterator[None]:
    """Compile what torch.compile was given, at its first call, also within `eager_unless_compiled`."""
    with torch.compiler.set_stance("default"):
        yield
