"""An optimizer's step that changes nothing if the gradient is not finite, for precision=fp16.

torch's fused kernels read on the device whether to do nothing. Other optimizers are called by the
host, which waits for the device in every step, as torch.amp.GradScaler does.
"""

from collections.abc import Callable
from typing import Any

import torch

from ddp_lab.observe.log import log
from ddp_lab.strategies.loss_scale import LossScale


class SkippedStep:
    """The step of an optimizer with a scaled loss.

    Args:
        optimizer: whose step it is.
        step: of the optimizer, as from `step_of`.
        scale: which has checked the gradient.
        is_planned: whether nothing is computed, so that the host has nothing to wait for.
        is_main: whether this rank logs.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], Any],
        scale: LossScale,
        is_planned: bool,
        is_main: bool,
    ):
        self.optimizer = optimizer
        self.step = step
        self.scale = scale
        self.is_planned = is_planned
        self._logs = is_main and not is_planned

    def __call__(self) -> None:
        if all(group.get("fused") for group in self.optimizer.param_groups):
            self._step_on_device()
        elif self.is_planned or self._is_finite():
            self.step()

    def _step_on_device(self) -> None:
        begin_momentum(self.optimizer)
        optimizer: Any = self.optimizer
        optimizer.found_inf = self.scale.not_finite
        try:
            self.step()
        finally:
            del optimizer.found_inf  # a step of somebody else would be skipped, too

    def _is_finite(self) -> bool:
        optimizer: Any = self.optimizer
        optimizer._opt_called = True  # torch would warn of a schedule that advances without a step
        if self._logs:
            self._logs = False
            log.info(
                f"precision=fp16: the host waits for the device in every step, because "
                f"{type(self.optimizer).__name__} has no fused kernel that can skip one"
            )
        return not self.scale.not_finite.item()


def begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give SGD its momentum of zeros before the first step.

    torch would create it without values, and a skipped first step would leave it so. Of zeros the
    first step computes the same: `momentum x 0 + gradient`.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        for parameter in group["params"]:
            if parameter.grad is not None and "momentum_buffer" not in optimizer.state[parameter]:
                zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                optimizer.state[parameter]["momentum_buffer"] = zeros.detach()


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a fused kernel can skip the optimizer's step, given that it has one.

    The first step of SGD with dampening is no step from a momentum of zeros.
    """
    return not any(group.get("dampening") for group in optimizer.param_groups)
