"""The place of a process among the others of its launch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Which rank of which node a process is. A node is what one torchrun agent starts, usually one machine.

    Attributes:
        rank, world_size: Index of this process and number of processes.
        local_rank, local_world_size: The same, counting only the processes of this node.
        node, nodes: Index of this node and number of nodes.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Place":
        """Return the place that torchrun's environment variables describe; that of a single process without them."""
        rank, world_size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
        local_size = int(environment.get("LOCAL_WORLD_SIZE", 1))
        node = int(environment.get("GROUP_RANK", rank // local_size))
        nodes = int(environment.get("GROUP_WORLD_SIZE", -(-world_size // local_size)))
        return cls(rank, world_size, int(environment.get("LOCAL_RANK", 0)), local_size, node, nodes)
