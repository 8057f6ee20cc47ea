"""The command `ddp-lab advise`, below its arguments: what it refuses, and which constants it uses."""

from collections.abc import Sequence

from hydra.utils import get_object

from ddp_lab.config.errors import ConfigError, listed
from ddp_lab.estimate.advice import Advice
from ddp_lab.estimate.cards import Card
from ddp_lab.estimate.constants import ASSUMED, Constants
from ddp_lab.estimate.constants_file import load
from ddp_lab.models.torchvision_models import torchvision_model
from ddp_lab.models.weights import check_file
from ddp_lab.run.advisor import Advisor
from ddp_lab.run.machine import Machine


def advise(overrides: Sequence[str], config_dir: str | None, machine: Machine) -> Advice:
    """Return the predictions for a run under every strategy.

    Args:
        overrides: of train.py.
        config_dir: directory of the user's own yaml.
        machine: the GPUs.

    Raises:
        ConfigError: the overrides are wrong, they choose another device than a GPU, or no strategy can be predicted.
    """
    advisor = Advisor(overrides, config_dir, machine, constants_for(machine.card))
    cfg = advisor.cfg
    if cfg.device not in ("auto", "cuda"):
        raise ConfigError(f"device={cfg.device}: predictions are made for GPUs, and for all that --gpus names; leave it out")
    if devices := cfg.strategy.get("devices"):
        raise ConfigError(
            f"strategy.devices={listed(devices)}: predictions are made for all GPUs that --gpus names; leave it out"
        )
    if (weights := cfg.model.get("weights")) and get_object(cfg.model["_target_"]) is not torchvision_model:
        check_file(weights)
    advice = advisor.advise()
    if not advice.predictions:
        first = advice.own_refusal or advice.refused[0]
        raise ConfigError(f"no strategy can be predicted on these GPUs. {first.name} is refused: {first.reason}")
    return advice


def constants_for(card: Card) -> Constants:
    """Return the measured constants of a card, or the assumed ones."""
    return load(card) or ASSUMED
