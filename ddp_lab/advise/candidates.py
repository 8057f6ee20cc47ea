"""The strategies and meshes that may be laid on a number of GPUs. Whether the model allows it, the strategies decide."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from ddp_lab.launch.command_line import CONF

ALONE = ("single", "dp", "split")  # strategies of one process
MOST_TP = 8  # ranks along tp, which need the links within a machine


class Candidate(NamedTuple):
    """A strategy with options.

    Attributes:
        strategy: its name.
        options: values of `strategy.*` that differ from those of the config.
        ranks: number of processes.
    """

    strategy: str
    options: dict[str, Any]
    ranks: int

    @property
    def overrides(self) -> list[str]:
        """The Hydra overrides that choose it."""
        options = [f"strategy.{key}={text(value)}" for key, value in self.options.items()]
        return [f"strategy={self.strategy}", *options]


def with_strategy(cfg: DictConfig, candidate: Candidate) -> DictConfig:
    """Return a config with another strategy, of which all other options have their defaults."""
    other = cfg.copy()
    other.strategy = OmegaConf.merge(OmegaConf.load(CONF / "strategy" / f"{candidate.strategy}.yaml"), candidate.options)
    return other


def text(value: Any) -> str:
    """Return a value as in a Hydra override."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def is_of_strategy(override: str) -> bool:
    """Return whether a Hydra override chooses or changes the strategy."""
    return re.match(r"(\+\+?|~)?strategy[.=]", override) is not None


def options_of(overrides: Iterable[str]) -> dict[str, str]:
    """Return the options of the strategy that Hydra overrides set, by name."""
    pairs = (re.match(r"\+{0,2}strategy\.([^=]+)=(.*)", override, re.DOTALL) for override in overrides)
    return {found[1]: found[2] for found in pairs if found}


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def candidates(gpus: int, per_node: int, checkpointing: bool, everything: bool) -> Iterator[Candidate]:
    """Yield the strategies for a number of GPUs, simple ones first.

    Args:
        gpus: number of all GPUs.
        per_node: number of GPUs of each machine.
        checkpointing: whether activations can be checkpointed by block.
        everything: whether to include every size of an axis, and every mesh.
    """
    saving = {"checkpoint_activations": "block"} if checkpointing else {}
    yield Candidate("single", {}, 1)
    if gpus > 1:
        yield from (Candidate(name, {}, gpus) for name in ("ddp", "fsdp"))
    if saving:
        yield Candidate("fsdp", saving, gpus)
    if gpus > 1:
        yield from (Candidate(name, {}, gpus) for name in ("pipeline", "scratch"))
        if gpus == per_node:
            yield Candidate("split", {}, 1)
    inner = [size for size in divisors(gpus) if size > 1 and (everything or size == 2)]
    yield from (Candidate("ddp_pipeline", {"pp": size}, gpus) for size in inner if size < gpus)
    yield from (Candidate("tp", {"tp": size}, gpus) for size in inner if size <= MOST_TP)
    if everything:
        yield from meshes(gpus, per_node, checkpointing)
    elif gpus > 2 and gpus % 2 == 0:
        yield from (Candidate("mesh", options, gpus) for options in ({"tp": 2}, {"pp": 2}))
    yield Candidate("fsdp", {"offload": True} | saving, gpus)


def with_own(found: list[Candidate], own: Candidate) -> list[Candidate]:
    """Return candidates, simple ones first, with one of the user's: after those of its strategy that have fewer options.

    It replaces the one that has the same options in any order.
    """
    others = [each for each in found if set(each.overrides) != set(own.overrides)]
    if len(others) < len(found):
        place = [set(each.overrides) for each in found].index(set(own.overrides))
    else:
        same = [place for place, each in enumerate(found) if each.strategy == own.strategy]
        simpler = [place for place in same if len(found[place].options) < len(own.options)]
        place = simpler[-1] + 1 if simpler else (same or [len(found)])[0]
    return [*others[:place], own, *others[place:]]


def meshes(gpus: int, per_node: int, checkpointing: bool) -> Iterator[Candidate]:
    """Yield the meshes that no other strategy is. The arguments are as in `candidates`."""
    for tp in (size for size in divisors(gpus) if size <= min(MOST_TP, per_node)):
        for pp in divisors(gpus // tp):
            dp = gpus // (tp * pp)
            shards = divisors(dp)[1:-1] if tp == pp == 1 else sorted({1, dp})
            for shard in shards:
                options = {"pp": pp, "tp": tp, "shard": shard}
                options = {key: value for key, value in options.items() if value > 1}
                for sequence in ({}, {"sequence_parallel": True})[: 2 if tp > 1 else 1]:
                    yield Candidate("mesh", options | sequence, gpus)
                    if checkpointing:
                        yield Candidate("mesh", options | sequence | {"checkpoint_activations": "block"}, gpus)
