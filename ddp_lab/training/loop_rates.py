"""The learning rates of a loop of the user's own, which may set them in the optimizer."""

from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from ddp_lab.config.errors import ConfigError


def unchanged(step: int) -> float:
    """Return the factor of a learning rate that no schedule changes."""
    return 1.0


class KeptRates(LambdaLR):
    """Counts steps, and leaves the learning rates as the loop, or a scheduler of torch, sets them.

    Args:
        optimizer: whose rates they are.
    """

    def __init__(self, optimizer: Any):
        self.set_by_loop = True  # in checkpoints, too, whose rates count then
        super().__init__(optimizer, unchanged)

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


class OwnSchedule(LambdaLR):
    """Sets the learning rates by a function of the user, and refuses that the loop sets them, too.

    Arguments as of LambdaLR.
    """

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next step.

        Raises:
            ConfigError: a rate of this step was another one than that of the schedule.
        """
        private: Any = self
        pairs = zip(private.base_lrs, private.lr_lambdas, strict=True)
        scheduled: list[float] = []
        if self.last_epoch >= 0:  # while the schedule is constructed, no rate is set yet
            scheduled = [base * factor(self.last_epoch) for base, factor in pairs]
        for group, rate in zip(self.optimizer.param_groups, scheduled, strict=False):
            if group["lr"] != rate:
                raise ConfigError(
                    f"schedule: sets the learning rate of this step to {rate:g}, but the loop has "
                    f"set it to {float(group['lr']):g}. Leave out schedule= of lab.trainer, or "
                    "change the rate in it alone"
                )
        super().step(epoch)
