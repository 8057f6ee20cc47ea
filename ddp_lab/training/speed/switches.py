"""torch's global switches that a fast step needs. Each holds within a `with` block and is restored after it."""

from collections.abc import Generator
from contextlib import contextmanager

import torch

# torch's limit is 8. It counts the pieces of a model (`Strategy.compile_pieces`) as one function with different shapes.
RECOMPILE_LIMIT = 64


@contextmanager
def cudnn_benchmark() -> Generator[None]:
    """Have cuDNN time all its kernels for every new convolution."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, 0
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


@contextmanager
def eager_unless_compiled() -> Generator[None]:
    """Run shapes that torch.compile has not compiled in eager mode. Within `compiling`, they are compiled."""
    # torch has no public form of the recompile limit.
    patch = torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT)  # pyright: ignore[reportPrivateUsage]
    with patch, torch.compiler.set_stance("eager_on_recompile"):
        yield


@contextmanager
def compiling() -> Generator[None]:
    """Compile at the first call again, within `eager_unless_compiled`."""
    with torch.compiler.set_stance("default"):
        yield
