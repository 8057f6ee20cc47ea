"""What the model of a run is tried with before the ranks connect."""

from typing import Any

import torch

from ddp_lab.data.dataset import Dataset
from ddp_lab.models.trial import Trial, check_logits, random_like
from ddp_lab.tasks.base import Task
from ddp_lab.tasks.classification import Classification, require_classes
from ddp_lab.tasks.loss_trial import trial_of_loss
from ddp_lab.tasks.nested import device_of, outputs_for, targets_for


def make_trial(dataset: Dataset, task: Task, freezes: bool = True) -> Trial:
    """Return what the model is tried with: two samples in the form of the dataset's.

    `freezes` is that of a Trial.
    """
    inputs, targets = dataset.train.example(2)
    if isinstance(task, Classification):
        require_classes(dataset)

        def check_classes(outputs: Any) -> torch.Tensor:
            logits = outputs_for(task, outputs, "it")
            check_logits(logits, len(dataset.classes))
            return logits.float().sum()

        return Trial(random_like(inputs), check_classes, freezes=freezes)

    def check(outputs: Any) -> torch.Tensor:
        taken = outputs_for(task, outputs, "it")
        expected = targets_for(task, targets, device_of(taken))
        with trial_of_loss():
            loss, _ = task.loss_sum(taken, expected)
        return loss

    return Trial(random_like(inputs), check, of_all=True, freezes=freezes)
