"""Global settings of torch that a fast step needs. Each applies within a `with` block and is restored after it."""

import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch._tensor_str import printoptions  # `torch.set_printoptions` cannot restore what was set before

from ddp_lab.world.process import REQUESTS

# torch's default is 8. The pieces of a model (`Strategy.compile_pieces`) count as one function with different shapes.
RECOMPILE_LIMIT = 64


@contextmanager
def float32_matmul(precision: str) -> Generator[None]:
    """Let float32 matrix multiplications use full precision ("highest"), or TF32 on GPUs that have it ("high")."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def describe_matmul(choice: str, precision: str, device: torch.device) -> str | None:
    """Return the log's line about float32 matrix multiplications; None where TF32 is never used.

    Args:
        choice, precision: the config keys `float32_matmul` and `precision`.
        device: of this rank. GPUs older than compute capability 8.0 (Ampere) do not have TF32.
    """
    if precision != "float32" or device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    other = {
        "highest": "float32 matrix multiplications use full precision; high uses TF32, which is faster and rounds to 3 digits",
        "high": "float32 matrix multiplications use TF32, which rounds to 3 digits; highest uses full precision",
    }
    return f"float32_matmul={choice}: {other[choice]}. cuDNN's convolutions use TF32 with both"


@contextmanager
def cudnn_benchmark(most: int = 0) -> Generator[None]:
    """Let cuDNN time its kernels for every new convolution and use the fastest.

    Args:
        most: number of kernels that are timed for each convolution; 0: all.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, most
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


def end_choosing() -> None:
    """Let cuDNN use what it has chosen in the current `cudnn_benchmark`, and its first guess for other shapes.

    Timing all kernels takes seconds for each batch size, which the partial last batch and an evaluation never earn.
    """
    torch.backends.cudnn.benchmark = False


@contextmanager
def fresh_compiler() -> Generator[None]:
    """Forget what was compiled before, and let torch.compile compile many pieces.

    With what earlier jobs of this process left, torch 2.11 failed to compile an optimizer with two parameter groups
    ("SpeculationLog diverged").
    """
    torch.compiler.reset()
    # torch has no public form of the recompile limit.
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):  # pyright: ignore[reportPrivateUsage]
        yield


@contextmanager
def eager_unless_compiled() -> Generator[None]:
    """Run shapes that are not compiled yet in eager mode. Only within `compiling`, new shapes are compiled."""
    with fresh_compiler(), torch.compiler.set_stance("eager_on_recompile"):
        yield


@contextmanager
def stance_restored() -> Generator[None]:
    """Let torch.compile compile everything again after the body, which may call `torch.compiler.set_stance`.

    torch._dynamo, which takes seconds to start, is not touched before: most runs never compile.
    """
    try:
        yield
    finally:
        if "torch._dynamo" in sys.modules:
            torch.compiler.set_stance("default")


@contextmanager
def compiling() -> Generator[None]:
    """Let torch.compile compile new shapes again, in a block within `eager_unless_compiled`. Called in the main thread.

    torch 2.11 prints every parameter while it compiles an optimizer (`id_match_unchecked`), so only few elements are printed.
    """
    with printoptions(edgeitems=1, threshold=0), torch.compiler.set_stance("default"), compilers_without_signals():
        yield


@contextmanager
def compilers_without_signals() -> Generator[None]:
    """Let processes that this thread starts never receive the signals that a scheduler or terminal sends to a whole launch.

    They are compilers. Without one, this process would fail or wait forever instead of saving a checkpoint. Its other threads
    still receive the signals.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
