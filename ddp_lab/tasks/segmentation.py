"""Semantic segmentation: a class for every pixel, some of which may be ignored."""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F

from ddp_lab.data.labels import LabelRange
from ddp_lab.tasks.base import Losses, LossFunction, Task


class Segmentation(Task):
    """Semantic segmentation: a class for each pixel.

    Outputs are logits, [b, classes, height, width]. Targets are classes, [b, height, width], from
    0. The loss is the cross-entropy of each pixel. Every pixel that is not ignored has the same
    weight, in whatever image, micro-batch or rank it is. Metrics are `accuracy`, that of the
    pixels, and `mean_iou`, the mean intersection over union of the classes that occur in targets
    or predictions.

    Args:
        loss: as in `Task`.
        ignore: the target of pixels that do not count.
    """

    takes_logits = True
    metric_mode: ClassVar = {"accuracy": "higher", "mean_iou": "higher"}

    def __init__(self, loss: LossFunction | None = None, ignore: int = 255):
        super().__init__(loss)
        self.ignore = ignore
        self.labels = LabelRange(ignore)

    def loss_fn(self, outputs: torch.Tensor, targets: torch.Tensor) -> Losses:
        targets = targets.long()
        self.require_labels(targets, outputs.size(1))
        losses = F.cross_entropy(outputs, targets, ignore_index=self.ignore, reduction="none")
        return losses, (targets != self.ignore).to(losses.dtype)

    def metric_inputs(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # torchmetrics would take logits for probabilities where all of a batch are from 0 to 1.
        return outputs.softmax(1), targets.long()

    def sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        classes = outputs.size(1)
        targets = targets.long()
        self.require_labels(targets, classes)
        valid = (targets != self.ignore).double().flatten()
        cells = torch.where(targets == self.ignore, 0, targets) * classes + outputs.argmax(1)
        confusion = valid.new_zeros(classes * classes).index_add_(0, cells.flatten(), valid)
        return {"confusion": confusion.view(classes, classes)}

    def metrics(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        confusion = sums["confusion"]
        right = confusion.diag()
        either = confusion.sum(0) + confusion.sum(1) - confusion.diag()
        used = either > 0
        mean_iou = (right[used] / either[used]).mean()
        return {"accuracy": float(right.sum() / confusion.sum()), "mean_iou": float(mean_iou)}
