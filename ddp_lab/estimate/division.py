"""How the ranks along tp divide the computation of a block, imitated on one rank: gathered tensors have their full size."""

from typing import NamedTuple

import torch
from torch import nn

from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.tensor_parallel import OWN
from ddp_lab.strategies.tensor_parallel_plan import plan_of
from ddp_lab.strategies.tp import TP


class Division(NamedTuple):
    """Where a block communicates along tp. The names are those of its modules.

    Attributes:
        tp: number of ranks.
        joined: layers whose outputs are gathered along the channels or units (strategy tp).
        summed: layers whose outputs are summed.
        gathered: modules whose input tokens are gathered, under sequence parallelism.
        scattered: modules of whose output each rank keeps its own tokens, which are summed if they are in `summed`, too.
    """

    tp: int = 1
    joined: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()

    def apply(self, block: nn.Module) -> None:
        """Let a copy of a block compute tensors of the sizes that they have on one rank."""
        modules = dict(block.named_modules())
        for name in self.joined:
            modules[name].register_forward_hook(self._join)
        for name in self.gathered:
            modules[name].register_forward_pre_hook(self._gather)
        for name in self.scattered:
            modules[name].register_forward_hook(self._scatter)

    def _join(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output] * self.tp, dim=1 if isinstance(module, nn.Conv2d) else -1)

    def _gather(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.cat([tokens] * self.tp, dim=1) for tokens in inputs)

    def _scatter(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output.chunk(self.tp, dim=1)[0].clone()


def division_of(strategy: Strategy, name: str, block: nn.Module) -> Division:
    """Return how a strategy divides a block along tp.

    Args:
        strategy: after `partition`.
        name: name of the block.
    """
    if isinstance(strategy, TP):
        own = [path for path in strategy.layers if path.split(".")[0] == name]
        return Division(strategy.axes["tp"], joined=tuple(path.removeprefix(name).removeprefix(".") for path in own))
    if not isinstance(strategy, Mesh) or strategy.axes["tp"] == 1:
        return Division()
    tp, plan = strategy.axes["tp"], plan_of(block)
    place = strategy.parts.names.index(name)
    before, after = strategy.tokens[place], strategy.tokens[place + 1]
    if plan is None:
        return Division(tp, gathered=("",) if before == OWN else (), scattered=("",) if after == OWN else ())
    rows = tuple(path for path, word in plan.items() if word == "row")
    if before != OWN:
        return Division(tp, summed=rows)
    together = tuple(path for path, word in plan.items() if word == "gather")
    inside = tuple(f"{path}." for path in together)
    alone = tuple(path for path, word in plan.items() if word in ("column", "heads") and not path.startswith(inside))
    return Division(tp, summed=rows, gathered=together + alone, scattered=rows)
