"""Multi-label classification: a sample has any number of labels."""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F

from ddp_lab.tasks.base import Losses, Task, require_same_shape


class MultiLabel(Task):
    """Multi-label classification: any number of labels for each sample.

    Outputs are logits, [b, labels]. Targets are 0 or 1 for each label, [b, labels]. The loss is the
    binary cross-entropy of each label. A logit above 0 decides for the label. Metrics are
    `accuracy`, the fraction of right decisions; `f1_micro`, the F1 score of all decisions; and
    `f1_macro`, the mean of the labels' F1 scores, without the labels that occur neither in targets
    nor in decisions.

    Args:
        loss: as in `Task`.
    """

    train_metrics = ("accuracy",)
    takes_logits = True
    metric_mode: ClassVar = {"accuracy": "higher", "f1_micro": "higher", "f1_macro": "higher"}

    def loss_fn(self, outputs: torch.Tensor, targets: torch.Tensor) -> Losses:
        require_same_shape(outputs, targets)
        return F.binary_cross_entropy_with_logits(
            outputs, targets.to(outputs.dtype), reduction="none"
        )

    def running_sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        right = (outputs > 0) == (targets > 0.5)
        return [right.sum() if self.loss is None else self.weighted_sum(right, outputs, targets)]

    def metric_inputs(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # torchmetrics would take logits for probabilities where all of a batch are from 0 to 1.
        return outputs.sigmoid(), (targets > 0.5).long()

    def sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        decided = outputs > 0
        true = targets > 0.5
        counts = {"true_positive": decided & true, "positive": true, "decided": decided}
        sums_of_batch = {name: value.sum(0).double() for name, value in counts.items()}
        return sums_of_batch | {
            "correct": (decided == true).sum().double(),
            "decisions": outputs.new_tensor(true.numel()).double(),
        }

    def metrics(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        true_positive = sums["true_positive"]
        either = sums["positive"] + sums["decided"]
        used = either > 0
        if used.any():
            macro = (2 * true_positive[used] / either[used]).mean()
        else:
            macro = torch.tensor(float("nan"))
        micro = 2 * true_positive.sum() / either.sum()
        values = {
            "accuracy": sums["correct"] / sums["decisions"],
            "f1_micro": micro,
            "f1_macro": macro,
        }
        return {name: float(value) for name, value in values.items()}
