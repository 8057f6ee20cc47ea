"""The GPUs for which predictions are made: numbers of the makers' data sheets, and the memory that torch reports."""

import difflib
import re
from dataclasses import dataclass
from typing import NamedTuple

from ddp_lab.config.errors import ConfigError

GB, GiB, TERA = 1e9, 2**30, 1e12
MOST = 9999  # GPUs of a machine


@dataclass(frozen=True)
class Card:
    """A GPU. All numbers but `memory` are peaks of its data sheet, without sparsity; measured ones are in constants.py.

    Attributes:
        name: how it is called in `--gpus`.
        memory: bytes, as torch.cuda.get_device_properties reports them: somewhat less than on the data sheet.
        bandwidth: bytes per second of its memory.
        float32, tf32, bf16: floating-point operations per second of matrix multiplications.
        link: bytes per second that it can send to the other GPUs of its machine, in one direction.
        key: part of the name that torch reports, in lower case and with hyphens for spaces, by which `--gpus here` finds it.
    """

    name: str
    memory: float
    bandwidth: float
    float32: float
    tf32: float
    bf16: float
    link: float
    key: str


def card(name: str, memory: float, bandwidth: float, flops: tuple[float, float, float], link: float, key: str) -> Card:
    """Return a card from GiB, GB/s, TFLOP/s in float32, TF32 and bf16, and GB/s."""
    float32, tf32, bf16 = (each * TERA for each in flops)
    return Card(name, memory * GiB, bandwidth * GB, float32, tf32, bf16, link * GB, key)


# SXM versions where there are several. The links are NVLink, else PCIe (16 lanes).
CARDS = {
    each.name: each
    for each in (
        card("B200", 178.4, 8000, (80, 1125, 2250), 900, "b200"),
        card("H200", 139.8, 4800, (67, 494, 989), 450, "h200"),
        card("H100", 79.1, 3350, (67, 494, 989), 450, "h100"),
        card("A100-80", 79.1, 2039, (19.5, 156, 312), 300, "a100-sxm4-80gb"),
        card("A100-40", 39.4, 1555, (19.5, 156, 312), 300, "a100-sxm4-40gb"),
        card("L40S", 44.4, 864, (91.6, 183, 362), 32, "l40s"),
        card("L4", 22.0, 300, (30.3, 60, 121), 32, "l4"),
        card("A10", 22.0, 600, (31.2, 62.5, 125), 32, "a10"),
        card("RTX4090", 23.5, 1008, (82.6, 82.6, 165), 32, "rtx-4090"),
        card("RTX3090", 23.6, 936, (35.6, 35.6, 71), 32, "rtx-3090"),
    )
}


class Gpus(NamedTuple):
    """The GPUs of one machine."""

    number: int
    card: Card


def parse_gpus(text: str) -> Gpus:
    """Return the GPUs that a text such as "2xH100" names.

    Raises:
        ConfigError: it is not of the form NUMBERxCARD, or the card is unknown.
    """
    found = re.fullmatch(r"([1-9]\d*)x(.+)", text)
    names = {name.lower(): name for name in CARDS}
    if found is None or found[2].lower() not in names:
        similar = [f"{found[1]}x{names[name]}" for name in like(found[2].lower(), list(names))] if found else []
        advice = f"Did you mean {' or '.join(similar)}? " if similar else ""
        raise ConfigError(
            f"--gpus {text}: must be here, or a number and a card such as 2xH100. {advice}Cards: {', '.join(CARDS)}. For "
            "another card, use one that has about as much memory and bandwidth"
        )
    if int(found[1]) > MOST:
        raise ConfigError(f"--gpus {text}: at most {MOST:,} GPUs of one machine are supported; see --nodes")
    return Gpus(int(found[1]), CARDS[names[found[2].lower()]])


def card_called(name: str) -> Card | None:
    """Return the card that torch calls `name`, for example "NVIDIA H200"; None if it is unknown."""
    name = name.lower().replace(" ", "-")
    matching = [each for each in CARDS.values() if re.search(rf"\b{re.escape(each.key)}\b", name)]
    return max(matching, key=lambda each: len(each.key), default=None)


def like(name: str, names: list[str]) -> list[str]:
    """Return the names that begin with a name, or that it extends by a hyphen; else those that are spelled alike."""
    related = [each for each in names if each.startswith(name) or name.startswith(f"{each}-")]
    return related or difflib.get_close_matches(name, names, n=2)
