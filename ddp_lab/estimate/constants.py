"""What no data sheet has and a card must be measured for; the values of an H200 until `--calibrate` has measured others."""

from dataclasses import dataclass

from ddp_lab.estimate.cards import GB, GiB

MiB = 2**20


@dataclass(frozen=True)
class Constants:
    """Constants of one card and this version of torch.

    The built-in values are those of two H200s with torch 2.11 on 2026-11-23: `context`, `communicator`, `float32`, `bandwidth`,
    `link` and `latency` by `--calibrate`, the others chosen by hand from the times of single kernels and of steps.

    Attributes:
        source: "assumed", or the hardware, the version of torch and the date of the measurement.
        context: bytes of the CUDA context and of the loaded kernels, which torch does not count as allocated.
        workspace: bytes that cuBLAS allocates through torch for a thread; forward and backward pass are two threads.
        communicator: bytes of NCCL's buffers for the first group of ranks.
        launch: seconds that Python and torch take for an average operation of a block in eager mode, forward or backward.
        step: seconds that they take for the rest of a step: the batch, the metrics, the schedule.
        replay: seconds of a small kernel in a CUDA graph, with the pause after it.
        start: seconds that a convolution takes, whatever its size, besides those of its FLOPs.
        float32, bf16: fraction of the card's peak that matrix multiplications achieve.
        tf32, tf32_last: fraction of the peak in TF32 that the convolutions of a ResNet achieve in float32, forward and
            backward, and that they achieve in the channels-last memory format.
        convolution, convolution_last: the same in bf16, of its peak.
        attention: fraction of the peak in bf16 that attention achieves over 196 tokens, forward and backward.
        bandwidth: fraction of the memory bandwidth that large elementwise operations achieve.
        strided: the same of tensors whose strides differ, such as those of a transposed and a contiguous one.
        reduction: the same of layer normalizations and sums.
        pooling: the same of average pooling, forward and backward.
        fused: the same of the kernels that torch.compile generates.
        batch_norm, batch_norm_last: the same of BatchNorm in float32, and in the channels-last memory format.
        batch_norm_bf16, batch_norm_bf16_last: the same in bf16.
        link: fraction of the link's bandwidth that a large all-reduce achieves (bus bandwidth, as NCCL's tests define it).
        latency: seconds of a small collective.
    """

    source: str = "assumed"
    context: float = 0.68 * GiB
    workspace: float = 32 * MiB
    communicator: float = 0.82 * GiB
    # From steps of 256 images on machines with H200s, eager, torch 2.11, 2026-11-22 and 23: LeNet 2.5 to 3.2 ms, ResNet-18 10.5
    # to 12.2 ms.
    launch: float = 46e-6
    step: float = 1.7e-3
    replay: float = 4.3e-6
    start: float = 12e-6
    float32: float = 0.76
    bf16: float = 0.66
    tf32: float = 0.3
    tf32_last: float = 0.43
    convolution: float = 0.28
    convolution_last: float = 0.57
    attention: float = 0.14
    bandwidth: float = 0.87
    strided: float = 0.36  # from the kernels of an eager ViT-S/16, whose tokens are transposed; so are `reduction` and `fused`
    reduction: float = 0.35
    pooling: float = 0.044  # LeNet's, in traces of its captured step
    fused: float = 0.72  # chosen by hand: 0.52 with a GELU, 0.78 with BatchNorm
    batch_norm: float = 0.27
    batch_norm_last: float = 0.82
    batch_norm_bf16: float = 0.07
    batch_norm_bf16_last: float = 0.32
    link: float = 0.64
    latency: float = 38e-6


ASSUMED = Constants()
BETWEEN_NODES = 50 * GB  # bytes per second of a GPU's own 400 Gbit/s network card, without --link
