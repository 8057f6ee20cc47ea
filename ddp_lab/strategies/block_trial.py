"""A trial of the plans of users' blocks, one block of each kind at a time.

A mesh does not hold a complete stage before it divides it, so a block is copied with its weights,
tried (plan_trial.py), and dropped. All ranks try the same blocks.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ddp_lab.models.chain import Chain
from ddp_lab.strategies.activation_sums import TokenGroup
from ddp_lab.strategies.block_plans import is_of_user, plan_of
from ddp_lab.strategies.divided_blocks import OWN, parallelize
from ddp_lab.strategies.plan_trial import BLOCK_REMEDY, PlanTrial, key_of_blocks
from ddp_lab.world.runtime import Runtime

SAMPLES = 2
ALL_TOKENS = [Replicate()]
OWN_TOKENS = [Shard(1)]


class TriedBlock(NamedTuple):
    """A block to be tried.

    Attributes:
        name: in the model.
        block: of the model, with or without data.
        shape: of the tokens of a sample that it gets.
    """

    name: str
    block: nn.Module
    shape: torch.Size


class AllTokens(nn.Module):
    """A block that gets and returns all tokens, [b, tokens, width], also where ranks share them.

    Args:
        name, block: as in `TriedBlock`.

    Attributes:
        mesh: the ranks that share the tokens; None: each has all of them.
    """

    def __init__(self, name: str, block: nn.Module):
        super().__init__()
        self.add_module(name, block)
        self.mesh: DeviceMesh | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        (block,) = self.children()
        if self.mesh is None:
            return block(tokens)
        whole = DTensor.from_local(tokens, self.mesh, ALL_TOKENS, run_check=False)
        outputs = block(whole.redistribute(placements=OWN_TOKENS).to_local())
        shared = DTensor.from_local(outputs, self.mesh, OWN_TOKENS, run_check=False)
        return shared.full_tensor(grad_placements=ALL_TOKENS)


def blocks_to_try(model: Chain, shapes: Sequence[torch.Size]) -> Iterator[TriedBlock]:
    """Yield a block of each kind of the user's: of each class, plan and sizes of parameters.

    Args:
        model: complete, with or without data.
        shapes: of a sample's activation before each block.
    """
    seen = set[object]()
    for (name, block), shape in zip(model.named_children(), shapes, strict=False):
        sizes = tuple(parameter.shape for parameter in block.parameters())
        kind = (type(block), str(plan_of(block)), sizes, shape)
        if is_of_user(block) and kind not in seen:
            seen.add(kind)
            yield TriedBlock(name, block, shape)


def try_block(
    tried: TriedBlock,
    group: TokenGroup,
    mesh: DeviceMesh,
    runtime: Runtime,
    to_device: Callable[[nn.Module], nn.Module],
) -> None:
    """Compare a copy of a block that is divided with the undivided one. Collective.

    Args:
        tried: the block.
        group, mesh: the ranks that share it.
        runtime: of this rank.
        to_device: moves modules to the device, or gives them their initial weights there.

    Raises:
        ConfigError: the plan does not compute what the block does.
    """
    name, block, shape = tried
    plan = plan_of(block)
    assert plan is not None
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.get_default_dtype())
    whole = AllTokens(name, copy.deepcopy(block))
    to_device(whole)
    trial = PlanTrial(
        model=whole,
        inputs=inputs,
        runtime=runtime,
        key=key_of_blocks([block]),
        remedy=BLOCK_REMEDY,
        layers={f"{name}.{path}": word for path, word in plan.items()},
    )
    tokens = OWN if group.share_tokens else Replicate()
    parallelize(whole.get_submodule(name), mesh, group, tokens, tokens)
    if group.share_tokens:
        whole.mesh = mesh
    trial.compare(lambda: None)
