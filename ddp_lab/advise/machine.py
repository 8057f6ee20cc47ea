"""The GPUs that plans are made for: numbers of the makers' data sheets, and the memory that torch reports."""

import difflib
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from ddp_lab.config.errors import ConfigError

GB, GiB, TERA = 1e9, 2**30, 1e12
MOST = 9999  # GPUs of a machine
BETWEEN_NODES = 50 * GB  # bytes per second of a GPU's own 400 Gbit/s network card, without --link


@dataclass(frozen=True)
class Card:
    """A GPU. All numbers but `memory` are peaks of its data sheet, without sparsity, which no program reaches.

    Attributes:
        name: how it is called in `--gpus`.
        memory: bytes, as torch.cuda.get_device_properties reports them: somewhat less than on the data sheet.
        tf32, bf16: floating-point operations per second of matrix multiplications and convolutions.
        link: bytes per second that it can send to the other GPUs of its machine, in one direction.
        key: part of the name that torch reports, in lower case and with hyphens for spaces, by which `--gpus here` finds it.
    """

    name: str
    memory: float
    tf32: float
    bf16: float
    link: float
    key: str


def card(name: str, memory: float, tf32: float, bf16: float, link: float, key: str) -> Card:
    """Return a card from GiB, TFLOP/s in TF32 and bf16, and GB/s."""
    return Card(name, memory * GiB, tf32 * TERA, bf16 * TERA, link * GB, key)


# SXM versions where there are several. The links are NVLink, else PCIe (16 lanes).
CARDS = {
    each.name: each
    for each in (
        card("B200", 178.4, 1125, 2250, 900, "b200"),
        card("H200", 139.8, 494, 989, 450, "h200"),
        card("H100", 79.1, 494, 989, 450, "h100"),
        card("A100-80", 79.1, 156, 312, 300, "a100-sxm4-80gb"),
        card("A100-40", 39.4, 156, 312, 300, "a100-sxm4-40gb"),
        card("L40S", 44.4, 183, 362, 32, "l40s"),
        card("L4", 22.0, 60, 121, 32, "l4"),
        card("A10", 22.0, 62.5, 125, 32, "a10"),
        card("RTX4090", 23.5, 82.6, 165, 32, "rtx-4090"),
        card("RTX3090", 23.6, 35.6, 71, 32, "rtx-3090"),
    )
}


@dataclass(frozen=True)
class Machine:
    """The devices of a launch.

    Attributes:
        card: the kind of GPU; None: CPU ranks, of which memory and peak are not known.
        per_node: number of GPUs, or ranks, of each machine.
        nodes: number of machines.
        between: bytes per second that a GPU can send to another machine.
    """

    card: Card | None
    per_node: int
    nodes: int = 1
    between: float = BETWEEN_NODES

    @property
    def gpus(self) -> int:
        return self.per_node * self.nodes

    @property
    def kind(self) -> str:
        return "cuda" if self.card else "cpu"

    def crosses(self, ranks: Iterable[int]) -> bool:
        """Return whether a group has ranks on several machines."""
        return len({rank // self.per_node for rank in ranks}) > 1

    def launch(self, overrides: list[str], ranks: int) -> str:
        """Return the command line of a run."""
        words = shlex.join(overrides)
        if ranks == 1:
            return f"python -m ddp_lab {words}"
        where = "--standalone"
        if self.nodes > 1:
            where = f"--nnodes={self.nodes} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"
        return f"torchrun {where} --nproc_per_node={self.per_node} -m ddp_lab {words}"


def find_machine(gpus: str, nodes: int = 1, link: float | None = None) -> Machine:
    """Return the devices that the command line names.

    Args:
        gpus: "here", number and card, or the number of CPU ranks such as "4xcpu".
        nodes: number of machines.
        link: GB/s between them; None: an assumed value.

    Raises:
        ConfigError: the card is unknown, or there is none here.
    """
    between = BETWEEN_NODES if link is None else link * GB
    if gpus != "here":
        number, found = parse_gpus(gpus)
        return Machine(found, number, nodes, between)
    if not torch.cuda.is_available():
        raise ConfigError(
            f"--gpus here: there is no GPU here. Use --gpus with a number and a card, of {', '.join(CARDS)}, or 2xcpu for two "
            "ranks on the CPU"
        )
    name = torch.cuda.get_device_name()
    known = card_called(name)
    if known is None:
        raise ConfigError(f"--gpus here: {name} is unknown. Use --gpus with a card that is like it, of {', '.join(CARDS)}")
    return Machine(replace(known, memory=torch.cuda.mem_get_info()[1]), torch.cuda.device_count(), nodes, between)


def parse_gpus(text: str) -> tuple[int, Card | None]:
    """Return number and kind of the GPUs that a text such as "2xH100" names; None for ranks on the CPU.

    Raises:
        ConfigError: it is not of the form NUMBERxCARD, or the card is unknown.
    """
    found = re.fullmatch(r"([1-9]\d*)x(.+)", text)
    names = {name.lower(): name for name in (*CARDS, "cpu")}
    if found is None or found[2].lower() not in names:
        similar = [f"{found[1]}x{names[name]}" for name in like(found[2].lower(), list(names))] if found else []
        advice = f"Did you mean {' or '.join(similar)}? " if similar else ""
        raise ConfigError(
            f"--gpus {text}: must be here, or a number and a card such as 2xH100. {advice}Cards: {', '.join(CARDS)}. For "
            "another card, use one that has about as much memory and bandwidth"
        )
    if int(found[1]) > MOST:
        raise ConfigError(f"--gpus {text}: at most {MOST:,} GPUs of one machine are supported; see --nodes")
    return int(found[1]), CARDS.get(names[found[2].lower()])


def card_called(name: str) -> Card | None:
    """Return the card that torch calls `name`, for example "NVIDIA H200"; None if it is unknown."""
    name = name.lower().replace(" ", "-")
    matching = [each for each in CARDS.values() if re.search(rf"\b{re.escape(each.key)}\b", name)]
    return max(matching, key=lambda each: len(each.key), default=None)


def like(name: str, names: list[str]) -> list[str]:
    """Return the names that begin with a name, or that it extends by a hyphen; else those that are spelled alike."""
    related = [each for each in names if each.startswith(name) or name.startswith(f"{each}-")]
    return related or difflib.get_close_matches(name, names, n=2)
