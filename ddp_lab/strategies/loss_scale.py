"""The scale of the loss with precision=fp16.

float16 has no positive number below 6e-8, so that small gradients of activations would be 0. The
loss is therefore multiplied by a scale, and the gradients of the parameters, which are in float32,
are divided by it (Micikevicius et al., Mixed Precision Training, 2018, section 3.2). Too large a
scale makes a gradient infinite: the step is then skipped and the scale halved; after many steps
without such a gradient it is doubled.

    loss x scale --backward--> gradients --sum over ranks--> / scale --norm--> finite? --> update

All of it is queued on the device, so that a CUDA graph can capture it. The norm is that of the
complete model's gradient, and the same on all ranks: all of them skip a step, or none. The scale is
a power of two, so that dividing by it rounds nothing but numbers below 1e-38.
"""

from collections.abc import Iterable
from typing import TypedDict

import torch

from ddp_lab.strategies.gradients import multiply

# those of torch.amp.GradScaler
INITIAL = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000  # steps without a skipped one, after which the scale grows


class SavedScale(TypedDict):
    """What a checkpoint holds.

    Attributes:
        scale: of the next step.
        growth_steps: steps since the scale changed, or a step was skipped.
        skipped_steps: since the beginning of the run.
    """

    scale: float
    growth_steps: int
    skipped_steps: int


class LossScale:
    """The scale of the loss, on the device.

    Args:
        device: of this rank; the first one of a process with several devices.

    Attributes:
        scale: of the next step, [].
        not_finite: whether the last step is skipped: 1.0 or 0.0, [], as fused optimizers take it.
        growth_steps, skipped_steps: as in `SavedScale`, [].
    """

    def __init__(self, device: torch.device):
        self.scale = torch.full((), INITIAL, dtype=torch.float32, device=device)
        self.not_finite = torch.zeros((), dtype=torch.float32, device=device)
        self.growth_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.skipped_steps = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def state(self) -> list[torch.Tensor]:
        """The tensors that a step changes."""
        return [self.scale, self.not_finite, self.growth_steps, self.skipped_steps]

    def divisor(self, global_size: int) -> torch.Tensor:
        """Return what the sum of the losses is divided by, [], for the scaled mean."""
        return global_size / self.scale

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss, [], times the scale."""
        return loss * self.scale.to(loss.device, non_blocking=True)

    def unscale(self, gradients: Iterable[torch.Tensor]) -> None:
        """Divide gradients by the scale, in place.

        Args:
            gradients: of parameters.
        """
        multiply(gradients, 1 / self.scale)

    def check(self, norm: torch.Tensor) -> torch.Tensor:
        """Decide whether the step is skipped; return whether its gradient is finite, [].

        Args:
            norm: L2 norm of the complete model's gradient, [], the same on all ranks.
        """
        is_finite = norm.isfinite()
        self.not_finite.copy_(~is_finite)
        return is_finite

    def update(self) -> None:
        """Set the scale of the next step, as torch.amp.GradScaler does."""
        self.skipped_steps += self.not_finite.to(torch.int32)
        torch._amp_update_scale_(  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
            self.scale, self.growth_steps, self.not_finite, GROWTH, BACKOFF, GROWTH_INTERVAL
        )

    def saved(self) -> SavedScale:
        """Return what a checkpoint holds. It waits for the device."""
        return {
            "scale": self.scale.item(),
            "growth_steps": int(self.growth_steps.item()),
            "skipped_steps": int(self.skipped_steps.item()),
        }

    def resume(self, saved: SavedScale) -> None:
        """Continue with what a checkpoint holds."""
        self.scale.fill_(saved["scale"])
        self.growth_steps.fill_(saved["growth_steps"])
        self.skipped_steps.fill_(saved["skipped_steps"])
