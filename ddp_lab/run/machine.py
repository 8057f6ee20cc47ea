"""The GPUs that predictions are made for."""

import shlex
from dataclasses import dataclass, replace

import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.estimate.cards import CARDS, GB, Card, card_called, parse_gpus
from ddp_lab.estimate.constants import BETWEEN_NODES


@dataclass(frozen=True)
class Machine:
    """The GPUs of a launch.

    Attributes:
        card: the kind of GPU.
        per_node: number of GPUs of each machine.
        nodes: number of machines.
        between: bytes per second that a GPU can send to another machine.
    """

    card: Card
    per_node: int
    nodes: int
    between: float

    @property
    def gpus(self) -> int:
        return self.per_node * self.nodes

    def launch(self, overrides: list[str], ranks: int) -> str:
        """Return the command line of a run."""
        words = shlex.join(overrides)
        if ranks == 1:
            return f"python -m ddp_lab {words}"
        where = "--standalone"
        if self.nodes > 1:
            where = f"--nnodes={self.nodes} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"
        return f"torchrun {where} --nproc_per_node={self.per_node} -m ddp_lab {words}"


def find_machine(gpus: str, nodes: int, link: float | None) -> Machine:
    """Return the GPUs that the command line names.

    Args:
        gpus: "here", or number and card.
        nodes: number of machines.
        link: GB/s between them; None: an assumed value.

    Raises:
        ConfigError: the card is unknown, or there is none here.
    """
    between = BETWEEN_NODES if link is None else link * GB
    if gpus != "here":
        found = parse_gpus(gpus)
        return Machine(found.card, found.number, nodes, between)
    if not torch.cuda.is_available():
        raise ConfigError(f"--gpus here: there is no GPU here. Use --gpus with a number and a card, of {', '.join(CARDS)}")
    name = torch.cuda.get_device_name()
    card = card_called(name)
    if card is None:
        raise ConfigError(f"--gpus here: {name} is unknown. Use --gpus with a card that is like it, of {', '.join(CARDS)}")
    return Machine(replace(card, memory=torch.cuda.mem_get_info()[1]), torch.cuda.device_count(), nodes, between)
