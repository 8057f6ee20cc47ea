"""A mesh with stages for a module that is no Chain: a trace is cut, and is replicated along dp.

    rank (pp 0, dp 0)   stage 0        rank (pp 1, dp 0)   stage 1
    rank (pp 0, dp 1)   stage 0        rank (pp 1, dp 1)   stage 1

The stages of a trace (traced_model.py) have no layers that could be divided over tp or sharded.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.strategies.all_reduce import flat
from ddp_lab.strategies.gradients import sum_gradients
from ddp_lab.strategies.mesh_model import MeshModel, Placed
from ddp_lab.strategies.traced_model import (
    UNSUPPORTED_BY_TRACES,
    TracedModel,
    cut_by_trace,
    require_traceable,
)
from ddp_lab.strategies.unused import every_gradient

if TYPE_CHECKING:
    from ddp_lab.strategies.mesh import Mesh


class MeshOfTraces(MeshModel):
    """What a mesh does with a module that is cut by a trace.

    Attributes:
        traced: the stages; None before `partition`.
    """

    unsupported = UNSUPPORTED_BY_TRACES
    has_shards = False

    def __init__(self) -> None:
        self.traced: TracedModel | None = None

    def partition(self, mesh: "Mesh", model: nn.Module, samples: int) -> None:
        self.traced = cut_by_trace(mesh, model, samples)
        self.bubble = self.traced.plan.bubble

    @property
    def _stages(self) -> TracedModel:
        assert self.traced is not None  # `partition`
        return self.traced

    def setup(self, mesh: "Mesh", model: nn.Module) -> Placed:
        assert mesh.pp_group is not None
        module = self._stages.place(model, mesh.to_device)
        executor = self._stages.executor(module, mesh.pp_group, mesh.task)
        return Placed(module, executor.has_loss, executor)

    def reduce_gradients(self, mesh: "Mesh") -> None:
        assert mesh.dp_group is not None
        assert mesh.pp_group is not None
        self._stages.weights.sum_copies(mesh.module, mesh.pp_rank, mesh.pp_group)
        if mesh.dp_size > 1:
            with every_gradient(mesh):
                sum_gradients(mesh.module.parameters(), partial(flat, group=mesh.dp_group))

    def require_called_hooks(self, mesh: "Mesh", model: nn.Module) -> None:
        if self.traced is not None:
            require_traceable(model, mesh.name)

    def counted_parameters(self, mesh: "Mesh") -> Iterable[nn.Parameter]:
        return self._stages.weights.counted_once(mesh.module, mesh.pp_rank)

    def describe(self, mesh: "Mesh") -> str:
        plan = self._stages.plan
        pp = mesh.axes["pp"]
        stages = plan.parts.describe([f"pp {stage % pp}" for stage in range(plan.num_stages)])
        layout = f"mesh on {mesh.where}: pp {pp} x dp {mesh.dp_size}"
        return f"{layout}, {stages}, {plan.describe()}"


def require_only_stages(keys: Mapping[str, Any], axes: Mapping[str, int], model: nn.Module) -> None:
    """Check that a mesh with stages of a module that is no Chain has no other axes than dp and pp.

    Args:
        keys: the options of the mesh.
        axes: sizes of its axes.
        model: that is no Chain.

    Raises:
        ConfigError: it has.
    """
    pp = axes["pp"]
    others = [f"strategy.{name}={axes[name]}" for name in ("tp", "shard") if axes[name] > 1]
    if keys["sequence_parallel"]:
        others.append("strategy.sequence_parallel=true")
    if others:
        raise ConfigError(
            f"strategy.pp={pp} {' '.join(others)}: {type(model).__name__} is no Chain of blocks, "
            f"so strategy.pp={pp} cuts it by a trace, whose stages have no layers that could be "
            "divided or sharded. Use strategy.pp with strategy.tp=1 strategy.shard=1, or "
            "strategy.tp and strategy.shard with strategy.pp=1, or return a Chain of blocks "
            "(docs/your-own.md)"
        )
