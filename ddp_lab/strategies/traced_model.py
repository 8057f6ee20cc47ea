"""A model that is no Chain, under a pipeline: its cut, and this rank's part of it."""

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.trees import Tree
from ddp_lab.models.cut_points import CutPoints
from ddp_lab.models.module_hooks import hook_of, require_no_hook
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.schedules import PipelinePlan
from ddp_lab.strategies.stage_weights import StageWeights
from ddp_lab.strategies.traced import OF_TRACES, Blueprint
from ddp_lab.strategies.traced_stages import TracedExecutor
from ddp_lab.tasks.base import Task

if TYPE_CHECKING:
    from ddp_lab.strategies.mesh import Mesh
    from ddp_lab.strategies.pipeline import Pipeline


# Why stages that are traces exclude performance options (`Strategy.unsupported`).
UNSUPPORTED_BY_TRACES: dict[str, str] = dict.fromkeys(("cuda_graph", "compile"), OF_TRACES)


class TracedModel:
    """The stages of a model that is cut by a trace.

    Args:
        strategy: in `partition`.
        model: complete.
        samples: number of samples that the pipeline gets at once.

    Attributes:
        plan: of the pipeline.
        weights: places of the parameters and buffers.

    Raises:
        ConfigError: there is no example, the model has hooks, or it cannot be traced or cut.
    """

    def __init__(self, strategy: "Pipeline | Mesh", model: nn.Module, samples: int):
        example = require_example(strategy)
        require_traceable(model, strategy.name)
        self.rank = strategy.pp_rank
        self.device = strategy.device
        self.blueprint = Blueprint(model, strategy.device, strategy.autocast, strategy.name)
        self.plan = PipelinePlan.make(
            strategy.keys,
            model,
            strategy.axes["pp"],
            samples,
            partial(self.blueprint.cut, example),
        )
        assert isinstance(self.plan.parts, CutPoints)
        size = -(-samples // self.plan.num_microbatches)
        inputs = self.blueprint.inputs(example, size)
        used = self.blueprint.used_by_stages(inputs, self.plan.parts.starts)
        self.weights = StageWeights(self.blueprint.model, used, self.plan.ranks, strategy.name)

    def place(self, model: nn.Module, to_device: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Return what this rank uses of a model, on the device, under its names.

        The model keeps all of its parameters, of which the optimizer needs to know.

        Args:
            model: complete.
            to_device: moves a part of it to the device, or gives it its weights there.
        """
        tensors = [*model.parameters(), *model.buffers()]
        copied = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        self.weights.keep(copied, self.rank)
        copied = to_device(copied)
        for name, parameter in copied.named_parameters(remove_duplicate=False):
            path, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(path), own_name, parameter)
        return copied

    def executor(self, model: nn.Module, group: dist.ProcessGroup, task: Task) -> TracedExecutor:
        """Return what runs batches through the stages.

        Args:
            model: from `place`.
            group: the ranks of the pipeline.
            task: with the training loss.
        """
        return TracedExecutor(
            plan=self.plan,
            blueprint=self.blueprint,
            model=model,
            rank=self.rank,
            group=group,
            task=task,
        )


def cut_by_trace(strategy: "Pipeline | Mesh", model: nn.Module, samples: int) -> TracedModel:
    """Return the stages of a model that is no Chain.

    Arguments and errors as in `TracedModel`; in addition BatchNorm must have local statistics.
    """
    if strategy.batch_norm == "sync":
        raise ConfigError(
            f"strategy.batch_norm=sync: is not supported by strategy={strategy.name} for a model "
            "that is no Chain, whose stages are traces without its layers. Use "
            "strategy.batch_norm=local, or strategy=ddp"
        )
    return TracedModel(strategy, model, samples)


def require_example(strategy: Strategy) -> Tree:
    """Return the example of a strategy, which a trace needs.

    Raises:
        ConfigError: there is none.
    """
    if strategy.example is None:
        raise ConfigError(
            f"strategy={strategy.name}: cuts the model by a trace, and needs a sample for it: "
            "lab.trainer(..., example=dataset[0])"
        )
    return strategy.example


def require_traceable(model: nn.Module, strategy: str) -> None:
    """Check that no module of a model has what a trace would call once only.

    Raises:
        ConfigError: one has.
    """
    if isinstance(model, nn.Sequential):  # with a hook of its own it is no Chain
        require_no_hook(model, strategy)
    for path, module in model.named_modules():
        if method := hook_of(module):
            where = f"the module {path}" if path else "the model"
            raise ConfigError(
                f"strategy={strategy}: cuts a model that is no Chain by a trace, which calls a "
                f"hook only once, and {where} has one ({method}). Compute it in forward, or use "
                "a strategy that does not cut the model, for example ddp"
            )
        if getattr(module, "drops_by_step", False):
            raise ConfigError(
                f"strategy={strategy}: cuts a model that is no Chain by a trace, in which the "
                f"{type(module).__name__} {path} would draw only once. Return a Chain of blocks, "
                "or use a strategy that does not cut the model, for example ddp"
            )
