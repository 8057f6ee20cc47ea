"""The learning rates of a loop of the user's own, which may set them in the optimizer."""

from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from ddp_lab.config.errors import ConfigError


def one(step: int) -> float:
    """Return the factor of a learning rate that no schedule changes."""
    return 1.0


class KeptRates(LambdaLR):
    """Counts steps, and leaves the learning rates as the loop, or a scheduler of torch, sets them.

    Args:
        optimizer: whose rates they are.
    """

    set_by_loop = True  # in checkpoints, too, whose rates count then

    def __init__(self, optimizer: Any):
        super().__init__(optimizer, one)

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"set_by_loop": True}


class OwnSchedule(LambdaLR):
    """Sets the learning rates by a function of the user, and refuses that the loop sets them, too.

    Arguments as of LambdaLR.
    """

    _rates: list[Any] | None = None  # as it has set them; None: they are not known

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next step.

        Raises:
            ConfigError: a rate of this step was another one than that of the schedule.
        """
        for group, rate in zip(self.optimizer.param_groups, self._rates or (), strict=False):
            if group["lr"] is not rate and group["lr"] != rate:
                raise ConfigError(
                    f"schedule: sets the learning rate of this step to {float(rate):g}, but the "
                    f"loop has set it to {float(group['lr']):g}. Leave out schedule= of "
                    "lab.trainer, or change the rate in it alone"
                )
        super().step(epoch)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "_rates"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._rates = None
