"""The devices that plans are made for: numbers of GPUs' data sheets, and how many there are."""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.world.device import CARDS, card_of, peak_flops

GiB = 2**30
GB = 1e9


@dataclass(frozen=True)
class Devices:
    """The devices of a launch.

    Attributes:
        name: of the card.
        per_node, nodes: number of devices of each machine, and of machines.
        memory: bytes of a device; infinite if it is not known.
        card: of CARDS; None for CPUs and unknown cards.
        between: bytes per second that a device can send to another machine.
        kind: "cuda" or "cpu".
    """

    name: str
    per_node: int
    nodes: int
    memory: float
    card: str | None = None
    between: float = 50 * GB
    kind: str = "cuda"

    @property
    def number(self) -> int:
        return self.per_node * self.nodes

    def peak(self, precision: str) -> float | None:
        """Return the FLOP/s of the card; None if they are not known."""
        return peak_flops(self.card, precision)

    def crosses(self, ranks: Iterable[int]) -> bool:
        """Return whether a group has ranks on several machines."""
        return len({rank // self.per_node for rank in ranks}) > 1

    def launch(self, overrides: list[str], ranks: int) -> str:
        """Return the command line of a run."""
        several = f"--nnodes={self.nodes} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"
        torchrun = (
            f"torchrun {several if self.nodes > 1 else '--standalone'} "
            f"--nproc_per_node={self.per_node}"
        )
        return f"{'python' if ranks == 1 else torchrun} -m ddp_lab {shlex.join(overrides)}"


def find_devices(text: str, nodes: int = 1, link: float = 50) -> Devices:
    """Return the devices that the command line names.

    Args:
        text: "here", number and card such as "2xH100", or number of CPU ranks such as "4xcpu".
        nodes: number of machines.
        link: GB/s that a device can send to another machine.

    Raises:
        ConfigError: the card is unknown, or there is none here.
    """
    if text == "here":
        if not torch.cuda.is_available():
            raise ConfigError(
                "--gpus here: there is no GPU here. Use 2xcpu, or a number and a card of "
                f"{', '.join(CARDS)}"
            )
        name = torch.cuda.get_device_name()
        memory = torch.cuda.mem_get_info()[1]
        return Devices(
            name=name,
            per_node=torch.cuda.device_count(),
            nodes=nodes,
            memory=memory,
            card=card_of(name),
            between=link * GB,
        )

    match = re.fullmatch(rf"([1-9]\d{{0,3}})x({'|'.join(CARDS)}|CPU)", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(
            f"--gpus {text}: must be here, or a number up to 9999 and a card such as 2xH100. "
            f"Cards: {', '.join(CARDS)}, cpu. For another card, use one that has about as much "
            "memory and bandwidth"
        )

    number = int(match[1])
    name = match[2].upper()
    if name == "CPU":
        return Devices("CPU ranks", number, nodes, float("inf"), kind="cpu")
    return Devices(
        name=name,
        per_node=number,
        nodes=nodes,
        memory=CARDS[name][0] * GiB,
        card=name,
        between=link * GB,
    )
