"""Language modelling: the next token at every position."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F

from ddp_lab.config.errors import SampleError
from ddp_lab.data.labels import LabelRange
from ddp_lab.tasks.base import Losses, LossFunction, Task, in_float32

IGNORE = -100  # the target of positions that do not count, as in F.cross_entropy


class Tokens(Task):
    """Language modelling: the next token at every position.

    Outputs are logits, [b, context, vocabulary]. Targets are numbers of tokens, int64 [b, context],
    from 0, or -100 at positions that do not count. The loss is the cross-entropy of each position.
    Metrics are `accuracy`, `perplexity`, the exponential of the mean cross-entropy, and
    `bits_per_byte`, which is the mean cross-entropy in bits, of tokens that are bytes. In training
    there is only the loss: the largest of 50,304 logits at every position would cost 2 % of a step
    of GPT-2.

    Args:
        loss: as in `Task`.
    """

    takes_logits = True
    metric_mode: ClassVar = {"accuracy": "higher", "perplexity": "lower", "bits_per_byte": "lower"}

    def __init__(self, loss: LossFunction | None = None):
        super().__init__(loss)
        self.labels = LabelRange(IGNORE)

    def loss_fn(self, outputs: torch.Tensor, targets: torch.Tensor) -> Losses:
        require_int64(targets)
        self.require_labels(targets, outputs.size(-1))
        losses = F.cross_entropy(
            in_float32(outputs.flatten(0, 1)),
            targets.flatten(),
            ignore_index=IGNORE,
            reduction="none",
        )
        return losses.view(targets.shape), (targets != IGNORE).to(losses.dtype)

    def sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        valid = targets != IGNORE
        losses, _ = self.loss_fn(outputs, targets)
        sums_of_batch = {
            "tokens": valid.sum(),
            "nats": losses.double().sum(),
            "correct": ((outputs.argmax(-1) == targets) & valid).sum(),
        }
        return {name: value.double() for name, value in sums_of_batch.items()}

    def metrics(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        nats = float(sums["nats"] / sums["tokens"])
        perplexity = math.exp(min(nats, 700.0))  # above it math.exp overflows
        accuracy = float(sums["correct"] / sums["tokens"])
        return {"accuracy": accuracy, "perplexity": perplexity, "bits_per_byte": nats / math.log(2)}


def require_int64(targets: torch.Tensor) -> None:
    """Raise a SampleError unless the targets are of the dtype that torch's cross-entropy needs."""
    if targets.dtype != torch.int64:
        kind = str(targets.dtype).removeprefix("torch.")
        raise SampleError(
            f"the targets are {kind}; numbers of tokens must be int64. Use targets.long()"
        )
