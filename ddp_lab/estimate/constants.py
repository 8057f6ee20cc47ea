"""What no data sheet has and a card must be measured for; assumed values until `--calibrate` has measured them."""

from dataclasses import dataclass

from ddp_lab.estimate.cards import GB, GiB

MiB = 2**20


@dataclass(frozen=True)
class Constants:
    """Constants of one card and this version of torch.

    Attributes:
        source: "assumed", or the hardware, the version of torch and the date of the measurement.
        context: bytes of the CUDA context and of the loaded kernels, which torch does not count as allocated.
        workspace: bytes that cuBLAS allocates through torch.
        communicator: bytes of NCCL's buffers for the first group of ranks.
        launch: seconds that Python and torch take for one operation of a block in eager mode, forward or backward.
        step: seconds that they take for the rest of a step: the batch, the metrics, the schedule.
        replay: seconds of the shortest kernel in a CUDA graph, with the pause after it.
        float32, bf16: fraction of the card's peak that large matrix multiplications achieve.
        tf32, tf32_last: fraction of the peak in TF32 that the convolutions of a ResNet achieve in float32, forward and
            backward, and that they achieve in the channels-last memory format.
        convolution, convolution_last: the same in bf16, of its peak.
        attention: fraction of the peak in bf16 that attention achieves, forward and backward.
        bandwidth: fraction of the memory bandwidth that large elementwise operations achieve.
        reduction: the same of normalizations and sums.
        link: fraction of the link's bandwidth that a large all-reduce achieves (bus bandwidth, as NCCL's tests define it).
        latency: seconds of a small collective.
    """

    source: str = "assumed"
    context: float = 0.6 * GiB
    workspace: float = 32 * MiB
    communicator: float = 0.6 * GiB
    # From two measured steps of 256 images on an H200, eager, torch 2.11, 2026-11-22: LeNet 2.65 ms, ResNet-18 10.5 ms.
    launch: float = 45e-6
    step: float = 1e-3
    replay: float = 5e-6
    float32: float = 0.8
    bf16: float = 0.72
    tf32: float = 0.2
    tf32_last: float = 0.2
    convolution: float = 0.24
    convolution_last: float = 0.24
    attention: float = 0.25
    bandwidth: float = 0.8
    reduction: float = 0.3
    link: float = 0.6
    latency: float = 40e-6


ASSUMED = Constants()
BETWEEN_NODES = 50 * GB  # bytes per second of a GPU's own 400 Gbit/s network card, without --link
