"""Classification: one of several classes for each sample."""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ddp_lab.config.errors import ConfigError, SampleError, TrainingError
from ddp_lab.config.types import Fraction
from ddp_lab.data.dataset import Dataset
from ddp_lab.data.labels import LabelRange
from ddp_lab.tasks.base import LossFunction, Task

TOP = 5  # a sample counts in the top-5 accuracy if its class has one of the five largest logits
MOST_CLASSES = 2000  # with more classes there is no confusion matrix: with 2,000 it has 32 MB


class CrossEntropy(nn.Module):
    """The cross-entropy.

    The test loss is computed without label smoothing, as by timm, so that it is the same for any
    recipe.

    Args:
        label_smoothing: probability mass that is taken from the target and spread evenly over all
            classes (Szegedy et al. 2016, arXiv:1512.00567).
    """

    weighted = False

    def __init__(self, label_smoothing: Fraction = 0.0):
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(
        self, outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "none"
    ) -> torch.Tensor:
        """Return the losses, [b], or their sum, for logits [b, classes] and targets.

        These are classes, [b], or probabilities, [b, classes].
        """
        smoothing = self.label_smoothing if self.training else 0.0
        return F.cross_entropy(outputs, targets, reduction=reduction, label_smoothing=smoothing)


class Classification(Task):
    """Classification: one of several classes for each sample.

    Outputs are logits, [b, classes]. Targets are classes, int64 [b], from 0; or, of batches that
    mixup or CutMix has mixed, probabilities of the classes, [b, classes]. The loss is the
    cross-entropy. Metrics are `accuracy` and, with more than five classes, `top5_accuracy`, both
    from 0 to 1.

    Args:
        loss: as in `Task`.
    """

    train_metrics = ("accuracy",)
    pictures = True
    takes_logits = True
    metric_mode: ClassVar = {"accuracy": "higher", "top5_accuracy": "higher"}

    def __init__(self, loss: LossFunction | None = None):
        super().__init__(loss or CrossEntropy())
        self.labels: LabelRange = LabelRange()  # pyright: ignore[reportIncompatibleVariableOverride]

    def monitorable(self, classes: int) -> list[str]:
        return [
            name
            for name in super().monitorable(classes)
            if name != "top5_accuracy" or classes > TOP
        ]

    def loss_sum(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(self.loss, CrossEntropy):  # one kernel
            self._require_classes(outputs, targets)
            weight = torch.full((), len(targets), device=outputs.device)
            if targets.dim() == 2:  # probabilities
                return self.loss(outputs, targets, "none").sum(), weight
            return self.loss(outputs, targets, "sum"), weight
        return super().loss_sum(outputs, targets)

    def _require_classes(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Check that targets are classes, or their probabilities, of outputs that are logits.

        Raises:
            TrainingError: the outputs are no logits.
            SampleError: the targets are not what they must be.
        """
        if outputs.dim() != 2:
            raise TrainingError(
                f"the outputs must be logits [b, classes], got {list(outputs.shape)}. Change the "
                "end of the model"
            )
        if targets.shape == outputs.shape and targets.is_floating_point():
            return

        if targets.dim() != 1 or targets.dtype != torch.int64:
            kind = str(targets.dtype).removeprefix("torch.")
            raise SampleError(
                f"the targets of a batch are {kind}, {list(targets.shape)}; classification needs "
                f"int64, [{len(targets)}], from 0 to {outputs.size(1) - 1}. Use targets.long(), "
                "and targets.flatten() where each row has one"
            )

        labels = self.labels
        classes = outputs.size(1)
        if not (labels.is_complete and labels.low >= 0 and labels.high < classes):
            labels.require(targets, classes)

    def running_sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        right = outputs.argmax(1) == classes_of(targets)
        return [self.weighted_sum(right, outputs, targets)]

    def metric_inputs(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # torchmetrics would take logits for probabilities where all of a batch are from 0 to 1.
        return outputs.softmax(1), targets

    def sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        self._require_classes(outputs, targets)
        classes = outputs.size(1)
        top = outputs.topk(min(TOP, classes), dim=1).indices
        predicted = outputs.argmax(1)
        sums_of_batch = {
            "top5": (top == targets.unsqueeze(1)).any(1).sum(),
            "correct": (predicted == targets).sum(),
        }
        sums_of_batch["samples"] = torch.full_like(sums_of_batch["correct"], len(targets))
        if classes <= MOST_CLASSES:
            cells = targets * classes + predicted
            ones = torch.ones_like(targets)
            sums_of_batch["confusion"] = (
                ones.new_zeros(classes * classes).index_add_(0, cells, ones).view(classes, classes)
            )
        return sums_of_batch

    def metrics(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        accuracy = {"accuracy": float(sums["correct"] / sums["samples"])}
        few = "confusion" in sums and len(sums["confusion"]) <= TOP
        if few:
            return accuracy
        return accuracy | {"top5_accuracy": float(sums["top5"] / sums["samples"])}


def classes_of(targets: torch.Tensor) -> torch.Tensor:
    """Return the class of each sample, [b]: for mixed targets, [b, classes], the likeliest one."""
    return targets if targets.dim() == 1 else targets.argmax(1)


def require_classes(dataset: Dataset) -> None:
    """Check that the targets of all sets are classes, as `require_class_targets`."""
    for name, samples in dataset.sets.items():
        _, targets = samples.example(1, "meta")
        if not isinstance(targets, torch.Tensor):
            kind = "none" if targets is None else f"a {type(targets).__name__}"
            raise ConfigError(
                f"task=classification: the targets of the {name} set are {kind}; expected a class "
                "for each sample, int64 of shape []. Choose it by data.targets, or choose another "
                "task"
            )
        require_class_targets(name, tuple(targets.shape[1:]), targets.dtype)


def require_class_targets(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check that the targets of a set are classes, by the shape and dtype of the first one.

    Raises:
        ConfigError: they are not.
    """
    if shape or dtype != torch.int64:
        kind = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"task=classification: the targets of the {name} set are {kind} of shape "
            f"{list(shape)}; expected a class for each sample, int64 of shape []. Return it by "
            "int(target), or choose another task"
        )
