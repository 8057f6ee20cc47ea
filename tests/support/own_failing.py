"""Classes as users write them: one raises in its constructor or at its first call.

It does so on the ranks that a test chooses.

The environment variable PLANTED says which: "model constructor ranks=0,1 before=1:0.5 after=0:0.5".
Rank 1 then sleeps for half a second before it raises, and rank 0 as long whenever the text of its
error is read, so that it reports it late.
"""

import os
import time

import torch
from own_strategies import Mine
from torch import nn
from torch.optim import SGD

from ddp_lab.tasks import Classification


def raise_if_planted(kind: str, place: str) -> None:
    """Raise a TypeError if it is planted at this place of a class of this kind, on this rank."""
    planted = os.environ.get("PLANTED", "").split()
    rank = os.environ.get("RANK")
    if planted[:2] != [kind, place]:
        return
    options = dict(option.split("=") for option in planted[2:])
    if rank not in options["ranks"].split(","):
        return
    time.sleep(delay_of(options.get("before", ""), rank))
    raise SlowError(f"planted in {kind} {place}", delay_of(options.get("after", ""), rank))


def delay_of(option: str, rank: str) -> float:
    """Return the seconds of an option RANK:SECONDS for a rank."""
    chosen, _, seconds = option.partition(":")
    return float(seconds) if chosen == rank else 0.0


class SlowError(TypeError):
    """A TypeError whose text takes some seconds to read."""

    def __init__(self, text: str, seconds: float):
        super().__init__(text)
        self.seconds = seconds

    def __str__(self) -> str:
        time.sleep(self.seconds)
        return super().__str__()


class Strategy(Mine):
    def __init__(self, runtime):
        raise_if_planted("strategy", "constructor")
        super().__init__(runtime)

    def reduce_gradients(self):
        raise_if_planted("strategy", "call")
        super().reduce_gradients()


class Task(Classification):
    def __init__(self, loss=None):
        raise_if_planted("task", "constructor")
        super().__init__(loss)

    def loss_sum(self, outputs, targets):
        raise_if_planted("task", "call")
        return super().loss_sum(outputs, targets)


class Tracker:
    def __init__(self, run):
        raise_if_planted("tracker", "constructor")

    def log_metrics(self, metrics, step, epoch):
        raise_if_planted("tracker", "call")

    def log_media(self, name, media, step, epoch):
        pass

    def finish(self, status, summary):
        pass


class Optimizer(SGD):
    def __init__(self, params, **options):
        raise_if_planted("optimizer", "constructor")
        super().__init__(params, **options)

    def step(self, closure=None):
        raise_if_planted("optimizer", "call")
        return super().step(closure)


class Dataset:
    classes = ("dark", "light")

    def __init__(self, train):
        raise_if_planted("dataset", "constructor")

    def __len__(self):
        return 16

    def __getitem__(self, index):
        raise_if_planted("dataset", "call")
        return torch.full((1, 8, 8), float(index % 2)), index % 2


class Model(nn.Module):
    def __init__(self, num_classes):
        raise_if_planted("model", "constructor")
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def forward(self, images):
        raise_if_planted("model", "call")
        return self.head(images.flatten(1))


class Scheduler:
    def __init__(self):
        raise_if_planted("scheduler", "constructor")

    def __call__(self, progress):
        raise_if_planted("scheduler", "call")
        return 1.0


class Loss:
    def __init__(self):
        raise_if_planted("loss", "constructor")

    def __call__(self, logits, targets):
        raise_if_planted("loss", "call")
        return nn.functional.cross_entropy(logits, targets, reduction="none")
