"""Language modelling: the next token at every position."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ddp_lab.config.errors import SampleError, TrainingError
from ddp_lab.config.types import Count
from ddp_lab.data.labels import LabelRange
from ddp_lab.tasks.base import Losses, LossFunction, Task, in_float32

if TYPE_CHECKING:
    from ddp_lab.tasks.chunked_loss import LossOfChunk

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
        head_chunks: number of chunks of rows in which the model's last layer computes the loss of a
            micro-batch in training, so that the logits of one chunk exist at a time; 1: the model
            returns all logits. For model=gpt and gpt2, and strategy=single, scratch, ddp, fsdp, and
            mesh with pp=1 and tp=1.
    """

    takes_logits = True
    metric_mode: ClassVar = {"accuracy": "higher", "perplexity": "lower", "bits_per_byte": "lower"}

    def __init__(self, loss: LossFunction | None = None, head_chunks: Count = 1):
        super().__init__(loss)
        self.labels = LabelRange(IGNORE)
        self.head_chunks = head_chunks
        self._of_chunk: LossOfChunk | None = None

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

    def losses_of_head(
        self,
        head: nn.Linear,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        factor: float | torch.Tensor = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from ddp_lab.tasks.chunked_loss import ChunkedLoss, Chunks, loss_of_chunk

        require_int64(targets)
        if hidden.shape[:-1] != targets.shape:
            raise TrainingError(
                f"{type(self).__name__}: needs a row of the last layer's inputs for every target, "
                f"got inputs of {list(hidden.shape)} and targets of {list(targets.shape)}"
            )
        self.require_labels(targets, head.weight.size(0))
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            hidden = hidden.to(torch.get_autocast_dtype(device))
        chunks = Chunks(self.head_chunks, self._of_chunk or loss_of_chunk)
        total: Any = ChunkedLoss.apply(
            hidden.flatten(0, -2),
            head.weight,
            targets.flatten(),
            factor,
            chunks,
        )
        return total, (targets != IGNORE).sum().to(total.dtype)

    def compile_head(self, compile_fn: Callable[..., Any]) -> None:
        from ddp_lab.tasks.chunked_loss import loss_of_chunk

        self._of_chunk = compile_fn(loss_of_chunk)

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
