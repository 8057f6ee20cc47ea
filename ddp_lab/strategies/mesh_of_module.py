"""A mesh without stages for any module: layers divided over tp by a plan, parts sharded over dp.

With tp=1 no plan is needed, and the mesh is fsdp with any number of replicas.

    rank (dp 0, tp 0)   shard 0 of the units 0 .. c/2        rank (dp 0, tp 1)   ... c/2 .. c
    rank (dp 1, tp 0)   shard 1 of the units 0 .. c/2        rank (dp 1, tp 1)

First the plan divides the layers (module_plans.py), and the model is compared with the undivided
one. Then `fully_shard` is applied to its parts, as under fsdp.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.data.trees import Tree
from ddp_lab.models.trial import some
from ddp_lab.models.usage import find_usage
from ddp_lab.strategies.batch_norm import set_batch_norm
from ddp_lab.strategies.dtensor import local
from ddp_lab.strategies.mesh_model import MeshModel, Placed
from ddp_lab.strategies.module_plans import ModulePlan, apply_plan, chosen_plan, require_sample
from ddp_lab.strategies.parameters import make_contiguous
from ddp_lab.strategies.unit_hooks import UnitHooks
from ddp_lab.strategies.unit_order import UnitOrder
from ddp_lab.strategies.units import find_units, require_one_dtype

if TYPE_CHECKING:
    from ddp_lab.strategies.mesh import Mesh

UNTESTED = "it was never tested with a mesh of a model that is no Chain"


def require_no_stages(
    keys: Mapping[str, Any],
    why: str = "with strategy.plan, which divides the layers of a complete module",
) -> None:
    """Raise a ConfigError if a mesh of a complete module has options of stages or blocks.

    Args:
        keys: the options of the mesh.
        why: it is a complete module.
    """
    for key, value, remedy in (
        ("pp", 1, "strategy.pp=1, or strategy=pipeline for a model without blocks"),
        ("cut", None, "strategy.cut=null"),
        ("sequence_parallel", False, "strategy.sequence_parallel=false"),
    ):
        if keys[key] != value:
            raise ConfigError(f"strategy.{key}={keys[key]}: is not supported {why}. Use {remedy}")


class MeshOfModule(MeshModel):
    """What a mesh does with a module that is no Chain.

    Args:
        option: strategy.plan; None: the plan of the model, if it has one.

    Attributes:
        plan: of the model; None: its layers are not divided. Known after `partition`.
        units: parts of the model that are gathered separately. Known after `partition`.
        hooks: on them. Known after `setup`.
    """

    plan: ModulePlan | None
    units: list[nn.Module]
    hooks: UnitHooks
    unsupported = dict.fromkeys(("compile", "cuda_graph"), UNTESTED)

    def __init__(self, option: Mapping[Any, str] | None):
        self.option = option

    def partition(self, mesh: "Mesh", model: nn.Module, samples: int) -> None:
        """Choose the plan and the units, as `Strategy.partition`.

        Raises:
            ConfigError: the plan does not fit the model, or there is no sample to try it with.
        """
        if self.option is None:
            kind = type(model).__name__
            require_no_stages(mesh.keys, f"by a mesh for {kind}, which is no Chain of blocks")
        self.plan = self._choose_plan(model, mesh.axes["tp"])
        if self.plan is not None:
            require_sample(mesh, self.plan)
        usage = None if mesh.example is None else find_usage(model, mesh.example)
        self.units = find_units(model, usage)
        names = {module: name for name, module in model.named_modules()}
        require_one_dtype([*self.units, model], names)
        self.tries_plan = self.plan is not None

    def _choose_plan(self, model: nn.Module, tp: int) -> ModulePlan | None:
        if self.option is None and tp == 1:
            return None
        plan = chosen_plan(model, self.option, tp)
        if plan is None and self.option is not None:
            raise ConfigError(
                "strategy.plan={}: names no layer. Name some, or use strategy=fsdp, which needs no "
                "plan"
            )
        if plan is None:
            raise ConfigError(
                f"strategy.tp={tp}: {type(model).__name__} is no Chain of blocks with a plan for "
                "tensor parallelism, and has no plan of its own. Name the layers to divide, for "
                "example strategy.plan={layers.*.up: column, layers.*.down: row}, or use "
                "strategy=tp, which needs no plan"
            )
        return plan

    def setup(self, mesh: "Mesh", model: nn.Module) -> Placed:
        along_tp = mesh.mesh["tp"]
        self.tp_group = along_tp.get_group()
        mesh.to_device(model)
        make_contiguous(model)
        model = set_batch_norm(model, mesh.batch_norm, mesh.dp_group)
        if self.plan is not None:
            self._divide(mesh, model, self.plan)

        self.hooks = UnitHooks(model, UnitOrder(mesh.runtime, mesh.name, None, mesh.peers()))
        mesh.shard([*self.units, model], mesh.along_dp(), reshard_after_forward=True)
        return Placed(model, along_tp.get_local_rank() == 0, forward=model)

    def _divide(self, mesh: "Mesh", model: nn.Module, plan: ModulePlan) -> None:
        """Divide the layers by the plan, and compare the model with the undivided one."""
        from ddp_lab.strategies.plan_trial import begin_trial

        trial = begin_trial(mesh, model, plan.key, plan.remedy, plan.words)
        apply_plan(model, plan, mesh.mesh["tp"])
        if trial is not None:
            trial.compare(lambda: self._sum_along_tp(model))

    def before_sharding(self, unit: nn.Module) -> None:
        self.hooks.before_sharding(unit)

    def after_sharding(self, unit: nn.Module) -> None:
        self.hooks.after_sharding(unit)

    def begin_step(self, inputs: Tree, has_samples: bool) -> None:
        self.hooks.has_samples = has_samples

    def no_sync(self) -> AbstractContextManager[object]:
        return self.hooks.no_sync()

    def reduce_gradients(self, mesh: "Mesh") -> None:
        assert mesh.dp_group is not None
        self.hooks.drop_unused(mesh.dp_group, mesh.device)
        self._sum_along_tp(mesh.module)

    def _sum_along_tp(self, model: nn.Module) -> None:
        """Sum the gradients of layers of which each rank has computed with its own units."""
        for name in self.plan.with_word("summed") if self.plan else ():
            for parameter in model.get_submodule(name).parameters():
                if parameter.grad is not None:
                    dist.all_reduce(local(parameter.grad), group=self.tp_group)

    def describe(self, mesh: "Mesh") -> str:
        replicate, shard, tp = (mesh.axes[name] for name in ("replicate", "shard", "tp"))
        names = [name for name, module in mesh.module.named_modules() if module in self.units]
        gathered = f"separately: {some(names)}" if names else "together"
        divided = ""
        if self.plan is not None:
            divided = f"{count(len(self.plan.divided), 'layer')} divided by {self.plan.key}, "
        return (
            f"mesh on {mesh.where}: dp {mesh.dp_size} x tp {tp}, dp = replicate {replicate} x "
            f"shard {shard}; {divided}parameters gathered {gathered}"
        )
