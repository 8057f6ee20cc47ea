"""Optimizers of a user."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import SGD, Optimizer


class ScheduleFree(Optimizer):
    """SGD that trains with y = 0.1 z + 0.9 x and is evaluated with x, the mean of all z.

    Defazio et al., The Road Less Scheduled, 2024. It counts its steps in the groups and refuses to
    step in the other mode, as the package `schedulefree` does.
    """

    def __init__(self, params: Iterable[Any], lr: float):
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    def train(self) -> None:
        self._turn(True, 1 - 0.9)

    def eval(self) -> None:
        self._turn(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def _turn(self, train_mode: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight)
                group["train_mode"] = train_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() first")
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "z" not in state:
                    state["z"] = parameter.clone()
                z = state["z"]
                x = parameter.lerp(z, 1 - 1 / 0.9)
                # The package reuses this memory, too.
                z.sub_(parameter.grad.mul_(float(group["lr"])))
                x.lerp_(z, 1 / group["k"])
                parameter.copy_(x.lerp(z, 1 - 0.9))


class Counting(SGD):
    """SGD whose learning rate falls with the steps that it counts in its groups."""

    def __init__(self, params: Iterable[Any], lr: float):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["taken"] = 0

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        (group,) = self.param_groups
        group["taken"] += 1
        rate = group["lr"]
        group["lr"] = rate / group["taken"]
        super().step()
        group["lr"] = rate
