"""The rates that kinds of kernels achieve on a device, measured with the shapes of a ResNet-18 and of a ViT-B/16.

On a GPU the kernels are replayed as CUDA graphs: in eager mode Python launches small ones more slowly than they compute.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

# Input and output channels, image size and stride of a ResNet-18's convolutions on images of 28x28 pixels, one of each kind.
PLAIN = ((64, 64, 28, 1), (128, 128, 14, 1), (256, 256, 7, 1), (512, 512, 4, 1))
RESNET = (*PLAIN, (64, 128, 28, 2), (128, 256, 14, 2), (256, 512, 7, 2))
ON_CPU = ((8, 8, 8, 1),)  # for tests
MORE = 4  # times as many samples, by which the fixed part of a convolution's time is found
HEADS, TOKENS, WIDTH = 12, 196, 64  # of a ViT-B/16


def seconds(run: Callable[[], object], device: torch.device, repeat: int) -> float:
    """Return the seconds of a call with its launch: the shortest mean of three rounds, after one that does not count."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    rounds = list[float]()
    for _ in range(4):
        wait()
        start = time.perf_counter()
        for _ in range(repeat):
            run()
        wait()
        rounds.append((time.perf_counter() - start) / repeat)
    return min(rounds[1:])


def kernel_seconds(run: Callable[[], object], device: torch.device, repeat: int = 4) -> float:
    """Return the seconds of the kernels of a call, on a GPU without the time that Python takes to launch them."""
    if device.type != "cuda":
        return seconds(run, device, repeat)
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):  # libraries choose kernels and allocate workspaces, which a capture does not allow
            run()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return seconds(graph.replay, device, repeat)


def forward_backward(run: Callable[..., torch.Tensor], given: Sequence[torch.Tensor], gradient: torch.Tensor) -> None:
    """Run a function and compute the gradients of what it is given."""
    given = [tensor.requires_grad_() for tensor in given]
    torch.autograd.grad(run(*given), given, gradient)


def matmul(dtype: torch.dtype, device: torch.device, size: int) -> float:
    """Return the FLOP/s of multiplying two square matrices."""
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / kernel_seconds(lambda: one @ other, device)


def linear(device: torch.device, tokens: int) -> float:
    """Return the FLOP/s of the linear layers of a transformer block in bf16, forward and backward."""
    width, flops, taken = HEADS * WIDTH, 0.0, 0.0
    for inputs, outputs in ((width, width), (width, 4 * width), (4 * width, width)):
        shapes = (tokens, inputs), (outputs, inputs), (tokens, outputs)
        given, weight, gradient = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in shapes)
        taken += kernel_seconds(partial(forward_backward, F.linear, (given, weight), gradient), device)
        flops += 3 * 2 * tokens * inputs * outputs
    return flops / taken


class Convolutions:
    """What the convolutions of a ResNet achieve, forward and backward. cuDNN uses TF32 for float32.

    Args:
        last: whether their memory format is channels_last.
        samples: number of images.

    Attributes:
        rate: FLOP/s of large ones: by how much MORE samples take longer.
        start: seconds of one however small, forward or backward.
    """

    def __init__(self, dtype: torch.dtype, last: bool, device: torch.device, samples: int):
        self.layers = RESNET if device.type == "cuda" else ON_CPU
        few, many = (self._seconds(dtype, last, device, number) for number in (samples, MORE * samples))
        flops = sum(3 * 2 * 9 * samples * (-(-size // stride)) ** 2 * one * two for one, two, size, stride in self.layers)
        fixed = max(1e-9, (MORE * few - many) / (MORE - 1))  # of a time that is linear in the number of samples
        self.rate = MORE * flops / max(many - fixed, many / MORE)
        self.start = fixed / (3 * len(self.layers))

    def _seconds(self, dtype: torch.dtype, last: bool, device: torch.device, samples: int) -> float:
        kind, layers = torch.channels_last if last else torch.contiguous_format, list[Callable[[], None]]()
        for one, two, size, stride in self.layers:
            shapes = (samples, one, size, size), (two, one, 3, 3), (samples, two, -(-size // stride), -(-size // stride))
            images, weight, gradient = (
                torch.randn(*shape, device=device).to(dtype=dtype, memory_format=kind) for shape in shapes
            )
            run = partial(F.conv2d, stride=stride, padding=1)
            layers.append(partial(forward_backward, run, (images, weight), gradient))
        return kernel_seconds(lambda: [layer() for layer in layers], device)  # one evicts the other's images from the cache


def attention(device: torch.device, samples: int) -> float:
    """Return the FLOP/s of attention in bf16, forward and backward, as `flops_of` counts them."""
    shape = (samples, HEADS, TOKENS, WIDTH)
    query, key, value, gradient = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    taken = kernel_seconds(partial(forward_backward, F.scaled_dot_product_attention, (query, key, value), gradient), device)
    return (4 + 10) * samples * HEADS * TOKENS**2 * WIDTH / taken


def bandwidth(device: torch.device, nbytes: int) -> float:
    """Return the bytes per second that an elementwise operation reads and writes."""
    values = torch.zeros(nbytes // 4, device=device)
    return 2 * nbytes / kernel_seconds(lambda: values.add_(1), device)


def strided(device: torch.device, samples: int) -> float:
    """Return the same of an operation that reads a transposed tensor."""
    tokens = torch.zeros(samples, TOKENS, HEADS * WIDTH, device=device)
    transposed = torch.zeros(samples, HEADS * WIDTH, TOKENS, device=device).transpose(1, 2)
    return 3 * tokens.nbytes / kernel_seconds(lambda: tokens.add_(transposed), device)


def reductions(device: torch.device, tokens: int) -> float:
    """Return the same of layer normalizations, forward and backward, and the gradients of biases."""
    width = HEADS * WIDTH
    values, gradient = (torch.randn(tokens, width, device=device) for _ in range(2))
    weight, bias = torch.ones(width, device=device), torch.zeros(width, device=device)

    def norm(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(values, (width,), weight, bias)

    taken = kernel_seconds(partial(forward_backward, norm, (values, weight, bias), gradient), device)
    taken += kernel_seconds(lambda: gradient.sum(0), device)
    return 6 * values.nbytes / taken  # read and written; read twice and written; read


def pooling(device: torch.device, samples: int) -> float:
    """Return the same of LeNet's first pooling, forward and backward, which reads and writes two sizes of images each time."""
    images = torch.randn(samples, 6, 28, 28, device=device).to(memory_format=torch.channels_last)
    pooled = F.avg_pool2d(images, 2)
    taken = kernel_seconds(partial(forward_backward, partial(F.avg_pool2d, kernel_size=2), (images,), pooled), device)
    return (3 * images.nbytes + 2 * pooled.nbytes) / taken


def batch_norm(dtype: torch.dtype, last: bool, device: torch.device, samples: int) -> float:
    """Return the same of BatchNorm, forward and backward, which read everything twice."""
    kind, nbytes = torch.channels_last if last else torch.contiguous_format, 0
    layers = list[Callable[[], None]]()

    def norm(images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(images, None, None, weight, bias, training=True)

    for channels, _, size, _ in PLAIN if device.type == "cuda" else ON_CPU:
        shape = (MORE * samples, channels, size, size)
        images, gradient = (torch.randn(*shape, device=device).to(dtype=dtype, memory_format=kind) for _ in range(2))
        weight, bias = torch.ones(channels, device=device), torch.zeros(channels, device=device)
        layers.append(partial(forward_backward, norm, (images, weight, bias), gradient))
        nbytes += 8 * images.nbytes  # three times forward, five times backward
    return nbytes / kernel_seconds(lambda: [layer() for layer in layers], device)
