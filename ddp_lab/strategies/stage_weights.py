"""Which rank of a pipeline has which parameters and buffers of a model.

    rank 0: embedding E -> blocks -> ... -> blocks -> head E^T: rank 3
            gradient of E  ---------- send ----------->  +
                           <--- send the sum of both ---

A rank keeps what its stages use. What several ranks use, such as the embedding of a language model
whose head is tied to it, has a copy on each of them, under its first name in the model. The
gradients of the copies are summed after the backward pass, so that the copies stay equal, and a
checkpoint has it once.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain, block_of, tie, tied_parameters
from ddp_lab.strategies.batch_norm import is_batch_norm
from ddp_lab.strategies.dtensor import local
from ddp_lab.strategies.schedules import PipelinePlan


class Copies(NamedTuple):
    """A parameter that several ranks of a pipeline use.

    Attributes:
        name: its first name in the model.
        ranks: numbers of the ranks in the pipeline.
    """

    name: str
    ranks: tuple[int, ...]


class StageWeights:
    """The places of the parameters and buffers of a model.

    Args:
        model: complete, with or without data.
        used: names of the parameters and buffers that each stage uses.
        ranks: number of ranks of the pipeline. Stage s is on rank s % ranks.
        strategy: its name, for messages.

    Attributes:
        copies: the parameters that several ranks use.
        ties: names of each parameter that has several.

    Raises:
        ConfigError: several ranks would change the same buffer.
    """

    def __init__(self, model: nn.Module, used: Sequence[Iterable[str]], ranks: int, strategy: str):
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        tensors = dict(named)
        self._names: dict[int, list[str]] = {}
        for name, tensor in named:
            self._names.setdefault(id(tensor), []).append(name)
        self._places: dict[int, set[int]] = {id(tensor): set() for _, tensor in named}
        for stage, names in enumerate(used):
            for name in names:
                if name in tensors:  # no constant of the trace
                    self._places[id(tensors[name])].add(stage % ranks)
        self.ties = tied_parameters(model)
        self.copies = [
            Copies(self._names[id(parameter)][0], tuple(sorted(self._places[id(parameter)])))
            for parameter in model.parameters()
            if len(self._places[id(parameter)]) > 1
        ]
        self._require_own_statistics(model, strategy)

    @classmethod
    def of_chain(cls, model: Chain, plan: PipelinePlan, strategy: str) -> "StageWeights":
        """Return the places for a Chain, each stage of which uses its own blocks.

        Args:
            model: complete, with or without data.
            plan: of the pipeline.
            strategy: its name, for messages.
        """
        parts = plan.parts
        block_names = [{parts.names[index] for index in part} for part in parts.parts]
        tensors = names_in(model)
        used = [{name for name in tensors if block_of(name) in blocks} for blocks in block_names]
        return cls(model, used, plan.ranks, strategy)

    def require_one_stage_a_rank(self, plan: PipelinePlan, strategy: str) -> None:
        """Check that no two stages of a Chain on the same rank have the same parameter.

        Raises:
            ConfigError: two have.
        """
        stages = enumerate(plan.parts.parts)
        stage_of = {plan.parts.names[index]: stage for stage, part in stages for index in part}
        for first, *others in self.ties:
            for name in others:
                stage = stage_of[block_of(name)]
                first_stage = stage_of[block_of(first)]
                if stage != first_stage and stage % plan.ranks == first_stage % plan.ranks:
                    raise ConfigError(
                        f"strategy={strategy}: {name} is the same parameter as {first}, which is "
                        "in another stage of the same rank, so that it would be sharded twice. Use "
                        "strategy.schedule=1f1b, which has one stage on each rank, or "
                        "strategy=pipeline"
                    )

    def with_first_names(self, blocks: nn.Module) -> nn.Module:
        """Return the blocks of a rank, whose tied parameters are tied, and have their first names.

        Where another rank has the block of the first name, an empty module holds it here.

        Args:
            blocks: a module of this rank's blocks by name, from `blocks_of`.
        """
        here = dict(blocks.named_children())
        holders: dict[str, nn.Module] = {}
        own_ties = [[name for name in names if block_of(name) in here] for names in self.ties]
        tie(blocks, own_ties)
        for names, own_names in zip(self.ties, own_ties, strict=True):
            block, *parents, name = names[0].split(".")
            if own_names and block not in here:
                module = holders.setdefault(block, nn.Module())
                for parent in parents:
                    if not hasattr(module, parent):
                        module.add_module(parent, nn.Module())
                    module = module.get_submodule(parent)
                module.register_parameter(name, blocks.get_parameter(own_names[0]))
        return nn.Sequential(OrderedDict(holders | here)) if holders else blocks

    def _require_own_statistics(self, model: nn.Module, strategy: str) -> None:
        for path, module in model.named_modules():
            for buffer in module.buffers(recurse=False):
                if is_batch_norm(module) and len(self._places[id(buffer)]) > 1:
                    raise ConfigError(
                        f"strategy={strategy}: several stages call {path}, a "
                        f"{type(module).__name__}, whose statistics would differ between them. "
                        "Name other modules in strategy.cut, or use a strategy that does not cut "
                        "the model, for example ddp"
                    )

    def keep(self, model: nn.Module, rank: int) -> None:
        """Remove from a model that is cut by a trace what a rank of the pipeline does not use.

        Args:
            model: the one of the constructor, or a copy of it.
            rank: number of the rank in the pipeline. The first one keeps what no stage uses.
        """
        kept = {
            name
            for key, names in self._names.items()
            if rank in (self._places[key] or {0})
            for name in names
        }
        for path, module in model.named_modules():
            for tensors in (module._parameters, module._buffers):  # pyright: ignore[reportPrivateUsage]
                for key in tensors:
                    if (f"{path}.{key}" if path else key) not in kept:
                        tensors[key] = None

    def sum_copies(self, model: nn.Module, rank: int, group: dist.ProcessGroup) -> None:
        """Replace the gradients of the copies of each parameter by their sum. Collective.

        The first rank that has a copy adds those of the others, in the order of the ranks.

        Args:
            model: of this rank, after `keep` and a backward pass.
            rank: number of this rank in the pipeline.
            group: the ranks of the pipeline.
        """
        for name, (first, *others) in self.copies:
            parameter = model.get_parameter(name) if rank in (first, *others) else None
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local(parameter.grad)
            if not gradient.numel():  # an empty shard, as the other ranks have
                continue
            if rank == first:
                received = torch.empty_like(gradient)
                for other in others:
                    dist.recv(received, group=group, group_src=other)
                    gradient += received
                for other in others:
                    dist.send(gradient, group=group, group_dst=other)
            else:
                dist.send(gradient, group=group, group_dst=first)
                dist.recv(gradient, group=group, group_src=first)

    def counted_once(self, model: nn.Module, rank: int) -> list[nn.Parameter]:
        """Return the parameters of this rank but the copies of which another rank has the first."""
        of_others = {name for name, ranks in self.copies if ranks[0] != rank}
        return [parameter for name, parameter in model.named_parameters() if name not in of_others]


def names_in(stage: nn.Module) -> set[str]:
    """Return the names of the parameters and buffers of a stage."""
    tensors = [
        *stage.named_parameters(remove_duplicate=False),
        *stage.named_buffers(remove_duplicate=False),
    ]
    return {name for name, _ in tensors}
