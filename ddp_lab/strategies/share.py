"""What a rank holds of the model: blocks, of which every parameter may be divided over tp and sharded along dp.

A strategy says what a rank will hold (`Strategy.share`) when it has decided so, before anything is allocated. `fully_shard` and
`distribute_tensor` cut a tensor along one dimension into pieces of ceil(size / ranks), of which the last ones may be smaller or
empty.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ddp_lab.strategies.tensor_parallel_plan import plan_of

# The dimension along which a plan's words divide a layer's parameters; those of the other words stay complete.
PLANNED = {"column": {"weight": 0, "bias": 0}, "heads": {"weight": 0, "bias": 0}, "row": {"weight": 1}}


@dataclass(frozen=True)
class Share:
    """The part of the model that one rank holds.

    Attributes:
        blocks: names of its blocks; None: the complete model.
        tp: number of ranks that divide the parameters in `divided`.
        divided: the dimension along which each parameter is divided over tp, by the parameter's name.
        shards: number of ranks over which the first dimension of every parameter is sharded.
        shard: which of them this rank is.
        offload: whether the rank keeps the shards in host memory.
    """

    blocks: tuple[str, ...] | None = None
    tp: int = 1
    divided: Mapping[str, int] = field(default_factory=dict[str, int])
    shards: int = 1
    shard: int = 0
    offload: bool = False

    def has(self, name: str) -> bool:
        """Return whether the block, parameter or buffer called `name` is one of the rank's."""
        return self.blocks is None or name.split(".")[0] in self.blocks

    def size(self, name: str, tensor: torch.Tensor) -> list[int]:
        """Return the shape of a parameter with which the rank computes: divided over tp, but not sharded."""
        size = list(tensor.shape)
        if name in self.divided:
            size[self.divided[name]] //= self.tp
        return size

    def elements(self, name: str, tensor: torch.Tensor) -> int:
        """Return the number of elements of the rank's part of a parameter; 0 if it is in a block of another rank."""
        if not self.has(name):
            return 0
        size = self.size(name, tensor)
        if self.shards > 1:
            piece = -(-size[0] // self.shards)
            size[0] = max(0, min(piece, size[0] - piece * self.shard))
        return torch.Size(size).numel()

    def nbytes(self, name: str, tensor: torch.Tensor) -> int:
        """Return the bytes of the rank's part of a parameter."""
        return self.elements(name, tensor) * tensor.element_size()


def planned(model: nn.Module) -> dict[str, int]:
    """Return the dimension along which the plans of the model's blocks divide each parameter, by name."""
    return {
        f"{name}.{path}.{parameter}": dimension
        for name, block in model.named_children()
        for path, word in (plan_of(block) or {}).items()
        for parameter, dimension in PLANNED.get(word, {}).items()
    }
