"""How much faster tensor parallelism can make a step.

The prediction follows from the FLOPs of the blocks and the bytes that the ranks send.

    one GPU    FLOPs of all blocks
    tp         FLOPs of the blocks without a plan + FLOPs of the others / tp + exposed communication
    ddp        FLOPs of all blocks / tp + exposed communication, on as many GPUs

Each pair of layers sums its tokens once in the forward pass, where it is exposed, and once in the
backward pass, where the gradients of the column layers' weights hide it, a third of the FLOPs of
the divided blocks.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ddp_lab.models.chain import Chain
from ddp_lab.models.partition import Partition
from ddp_lab.run.job import Job
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.block_plans import plan_of, plans_for
from ddp_lab.world.device import CARDS, card_of, half_dtype, peak_flops

# Shares of the data sheet's numbers that a step reaches: compiled ViT-L/16 trains with 41 % of the
# FLOP/s, and an all-reduce of 1 GiB runs at 329 GB/s of 450 (H100s, torch 2.11, 2026-11-26).
COMPUTED = 0.41
SENT = 0.73


@dataclass(frozen=True)
class Prediction:
    """What a step takes on one GPU and on several, predicted. It is no measurement.

    Attributes:
        tp: number of ranks that share the blocks.
        flops, divided: of a step on one GPU, and of the blocks with a plan among them.
        sums: bytes that each rank sends for the tokens in the forward pass, and again in the
            backward pass.
        gradients: bytes of all gradients.
        rate: FLOP/s of a GPU.
        link: bytes per second to the other GPUs.
    """

    tp: int
    flops: float
    divided: float
    sums: float
    gradients: float
    rate: float
    link: float

    @property
    def alone(self) -> float:
        """Seconds of a step on one GPU."""
        return self.flops / self.rate

    @property
    def seconds(self) -> float:
        """Seconds of a step with tensor parallelism."""
        divided = self.divided / self.tp / self.rate
        computed = (self.flops - self.divided) / self.rate + divided
        return computed + self.sums / self.link + max(0.0, self.sums / self.link - divided / 3)

    @property
    def replicated(self) -> float:
        """Seconds of a step with ddp on as many GPUs, of the same global batch."""
        computed = self.alone / self.tp
        sending = 2 * (self.tp - 1) / self.tp * self.gradients / self.link
        return computed + max(0.0, sending - computed * 2 / 3)

    def __str__(self) -> str:
        """Return one line for the log and for `advise`."""
        sent = f"{2 * self.sums / 1e9:.3g} GB to send at {self.link / 1e9:.0f} GB/s"
        times = (
            f"{1000 * self.seconds:.3g} ms for {1000 * self.alone:.3g} ms on one GPU, with {sent}"
        )
        if self.seconds < self.alone:
            gain = self.alone / self.seconds
            return (
                f"prediction from FLOPs and bytes: tp={self.tp} is at most {gain:.2f}x as fast as "
                f"one GPU, {times}"
            )

        faster = "ddp" if self.replicated < self.alone else "single"
        return (
            f"prediction from FLOPs and bytes: tp={self.tp} is not faster than one GPU, {times}; "
            f"strategy={faster} would be faster, with "
            f"{1000 * min(self.replicated, self.alone):.3g} ms for the same batch"
        )


def predict(
    model: nn.Module, strategy: Strategy, samples: int, precision: str, card: str
) -> Prediction | None:
    """Return the prediction for a strategy.

    Return None without tensor parallelism, or for a card of unknown FLOP/s.

    Args:
        model: The complete model, before `strategy.setup`.
        strategy: It may have an axis tp.
        samples: Of a local batch.
        precision: float32, bf16 or fp16.
        card: Of CARDS.
    """
    tp = strategy.axes.get("tp", 1)
    peak = peak_flops(card, precision)
    is_cut = strategy.axes.get("pp", 1) > 1
    if (
        tp == 1
        or is_cut
        or peak is None
        or not isinstance(model, Chain)
        or not plans_for(model, tp)[0]
    ):
        return None

    parts = Partition(model, 1)
    dtype = half_dtype(precision) or torch.get_default_dtype()
    item = dtype.itemsize
    divided = 0.0
    sums = 0.0
    for block, flops, shape in zip(model, parts.flops, parts.shapes, strict=False):
        rows = list((plan_of(block) or {}).values()).count("row")
        if rows:
            divided += 3 * samples * flops
        sums += 2 * (tp - 1) / tp * rows * samples * shape.numel() * item

    gradients = sum(parameter.nbytes for parameter in model.parameters())
    link = SENT * CARDS[card][3] * 1e9
    return Prediction(
        tp=tp,
        flops=3 * samples * sum(parts.flops),
        divided=divided,
        sums=sums,
        gradients=gradients,
        rate=COMPUTED * peak,
        link=link,
    )


def predict_here(job: Job) -> Prediction | None:
    """Return the prediction for a run on this machine's GPUs; None on CPUs and unknown cards."""
    card = card_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if card is None:
        return None
    return predict(job.model, job.strategy, job.sizes.samples_at_once, job.runtime.precision, card)
