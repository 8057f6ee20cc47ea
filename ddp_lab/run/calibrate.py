"""The calibration of the card that a config names, on one rank or on several."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.estimate.calibrate import measure_card, measure_link
from ddp_lab.estimate.cards import CARDS, Card, card_called
from ddp_lab.estimate.constants import Constants
from ddp_lab.estimate.constants_file import save
from ddp_lab.run.launching import launch_seconds
from ddp_lab.world.runtime import Runtime


def card_of(runtime: Runtime) -> Card:
    """Return the card of this rank.

    Raises:
        ConfigError: there is none, or it is unknown.
    """
    if runtime.device.type != "cuda":
        raise ConfigError("--calibrate: no GPU is available, and only GPUs are measured; run it on a machine that has one")
    name = torch.cuda.get_device_name(runtime.device)
    card = card_called(name)
    if card is None:
        raise ConfigError(f"--calibrate: {name} is unknown; the cards are {', '.join(CARDS)}")
    return card


def calibrate(runtime: Runtime, card: Card) -> tuple[Constants, Path]:
    """Measure the constants of the card here, and write them to its file. Collective.

    Raises:
        ConfigError: the file cannot be written.
    """
    device = runtime.device
    constants = measure_card(card, device)  # before steps load more libraries than a small one needs
    launch, step = launch_seconds(card, device)
    constants = replace(constants, launch=launch, step=step)
    if runtime.world_size > 1:
        free = runtime.free_memory() if device.type == "cuda" else 0
        runtime.open_group()
        constants = measure_link(constants, card, device, free)
    path = runtime.agree("constants", lambda: str(save(constants, card)))
    return constants, Path(path)


def describe(constants: Constants, path: Path) -> str:
    """Return lines for the user."""
    return f"{path}: {json.dumps(asdict(constants), indent=1)}"
