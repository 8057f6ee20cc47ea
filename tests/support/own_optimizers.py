"""Optimizers of a user."""

from torch.optim import SGD


class WithModes(SGD):
    """An optimizer that has other weights in evaluations, as schedule-free ones."""

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass
