"""Metrics as users write them."""

import torch
from torchmetrics import Metric


class Ordered(Metric):
    """A number that depends on the order of the samples and on the batches they come in.

    Its states do not say how they are added over ranks.
    """

    higher_is_better = True

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.scale = scale
        self.add_state("value", torch.zeros((), dtype=torch.float64))
        self.add_state("seen", torch.zeros((), dtype=torch.int64))
        self.add_state("batches", torch.zeros((), dtype=torch.int64))

    def update(self, preds, target):
        places = torch.arange(int(self.seen), int(self.seen) + len(target))
        self.value += (places * preds.double()[:, 0]).sum() * (1 + self.batches)
        self.seen += len(target)
        self.batches += 1

    def compute(self):
        return self.scale * self.value


class Seen(Metric):
    """The number of samples."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, preds, target):
        self.seen += len(target)

    def compute(self):
        return self.seen


class Failing(Seen):
    """Fails in a method after some batches."""

    def __init__(self, method: str = "update", after: int = 0):
        super().__init__()
        self.method = method
        self.left = after

    def update(self, preds, target):
        super().update(preds, target)
        self.left -= 1
        if self.method == "update" and self.left < 0:
            raise ValueError("cannot count")

    def compute(self):
        if self.method == "compute":
            raise ValueError("cannot divide")
        return super().compute()


class Rows(Seen):
    """Returns a number for each class."""

    def compute(self):
        return torch.ones(10)


class Accuracy(Seen):
    """Has the name of a metric of the task."""


class NoMetric:
    def update(self, preds, target):
        pass
