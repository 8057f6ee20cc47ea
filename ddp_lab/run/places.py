"""The ranks that predictions are made for, and their communicators."""

from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.pipeline import Pipeline
from ddp_lab.strategies.split import Split


def place_along_pp(strategy: Strategy, rank: int) -> int:
    """Return the place of a rank in its pipeline."""
    return rank // (strategy.dp_size * strategy.axes["tp"]) if isinstance(strategy, Mesh) else rank


def places(strategy: Strategy) -> list[int]:
    """Return one rank of each stage, that with the first shard, which is the largest; under split one device of each stage."""
    if isinstance(strategy, Mesh):
        return [index * strategy.dp_size * strategy.axes["tp"] for index in range(strategy.axes["pp"])]
    if isinstance(strategy, Pipeline):
        return list(range(strategy.axes["pp"]))
    return list(range(len(strategy.parts.parts))) if isinstance(strategy, Split) else [0]


def communicators(strategy: Strategy) -> int:
    """Return the number of NCCL communicators of a rank: one for the world and one for each axis of several ranks."""
    if strategy.one_process:
        return 0
    sizes = [size for size in strategy.axes.values() if size > 1]
    return len(sizes) + (len(sizes) > 1)
