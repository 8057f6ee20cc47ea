"""Tensor parallelism: a model is divided by a plan, or its layers are sharded one by one.

There are three ways, of which the first that fits the model is taken (`TP.partition`):

1. The model's blocks have plans, the attribute `tensor_parallel` (block_plans.py).
2. `strategy.plan`, or the plan of a model of transformers, names layers of any module
   (module_plans.py). An option that is set precedes the blocks' plans.
3. Without a plan every layer is sharded (sharded_layers.py).

In the third way each rank computes some of a convolution's output channels, or of a linear layer's
units, from the complete input. The outputs are concatenated.

    forward   complete input --+-- rank 0: channels 0 .. c/2 --+-- all_gather: complete output
                               +-- rank 1: channels c/2 .. c --+

    backward  each rank takes its channels of the output's gradient, and computes from them a
              gradient of the input; all_reduce sums these

That is two collectives per layer, each of the size of the layer's activations: far more traffic
than in data parallelism. The ranks therefore need fast links, and it pays only if a single layer is
too large for a device. The models contain no code for it: `setup` shards their layers by name.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn.utils import get_total_norm

from ddp_lab.config.errors import ConfigError, TrainingError, count, count_with_verb, describe_error
from ddp_lab.config.types import Count, ModulePattern
from ddp_lab.data.trees import Tree
from ddp_lab.models.chain import tied_parameters
from ddp_lab.models.trial import some
from ddp_lab.models.usage import find_usage
from ddp_lab.strategies.activation_sums import TokenGroup, make_group
from ddp_lab.strategies.all_reduce import flat
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.batch_norm import BatchNorm, set_batch_norm
from ddp_lab.strategies.block_plans import is_of_user, plan_of, plans_for
from ddp_lab.strategies.divided_blocks import divide
from ddp_lab.strategies.dtensor import local
from ddp_lab.strategies.gradients import all_gradients_of
from ddp_lab.strategies.module_plans import ModulePlan, apply_plan, chosen_plan, require_sample
from ddp_lab.strategies.parameter_hooks import require_no_hooks
from ddp_lab.strategies.peer_sums import PeerSums
from ddp_lab.strategies.sharded_layers import can_be_sharded, parallelize_layer, shard_channels
from ddp_lab.strategies.unused import every_gradient
from ddp_lab.world.runtime import Runtime


@contextmanager
def explain_direct_use() -> Generator[None]:
    """Replace torch's error about a sharded weight beside an unsharded tensor by what to do.

    Raises:
        TrainingError: in place of it.
    """
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise TrainingError(
            "strategy=tp: the model uses the weight of a sharded layer without calling the layer, "
            "as in F.linear(x, layer.weight), and did not so for the example, or there was none. "
            "Such layers are found and kept complete with lab.trainer(..., example=dataset[0]); "
            f"or use another strategy, for example ddp. {describe_error(error)}"
        ) from None


class TP(Strategy):
    """Tensor parallelism in each replica, and data parallelism, with one all-reduce, between them.

    Args:
        tp: number of ranks that share each layer; null uses all ranks. The number of replicas is
            the number of ranks / tp. Blocks with a plan are divided by it, and every rank computes
            the others, if `tp` divides all heads and units that the plans name. Otherwise layers
            are sharded one by one. Every rank then computes the complete layer where `tp` does not
            divide its channels or units, where its parameters are also those of another layer,
            where the model uses them without calling the layer (F.linear(x, layer.weight)), and
            where it is not computed like one of torch's plain layers: with groups, other padding
            than zeros, computed weights, or a class of its own.
        plan: which layers are sharded in pairs, of any module: their names or patterns of names,
            and for each a word such as column or row (module_plans.py); every rank computes the
            others. null: the plan of the model's blocks, or that of a model of transformers. {}: no
            plan, so layers are sharded one by one.

    Raises:
        ConfigError: the number of ranks is not divisible by `tp`; or, in `partition`, no layer can
            be sharded, or the plan does not fit the model; or, in `setup`, the model computes
            something else with the plan.
    """

    replaces_parameters = True
    supported_options = frozenset({"cuda_graph", "compile", "fused"})

    def __init__(
        self,
        runtime: Runtime,
        tp: Count | None,
        batch_norm: BatchNorm,
        plan: dict[ModulePattern, str] | None = None,
    ):
        super().__init__(runtime, {"tp": tp or runtime.world_size}, batch_norm)
        self.plan_option = None if plan is None else dict(plan)
        self.is_metric_rank = runtime.rank % self.axes["tp"] == 0
        # parameters whose gradients are summed over tp: each rank computes with its own units
        self.summed: list[nn.Parameter] = []

    def partition(self, model: nn.Module, samples: int) -> None:
        super().partition(model, samples)
        require_no_hooks(model, self.name)
        tp = self.axes["tp"]
        self.plans: dict[str, nn.Module] = {}  # blocks that are divided by the plan of their class
        self.plan: ModulePlan | None = None  # of any module, by the names of its layers
        self.why_layers = "strategy.plan={} names no layer"
        if self.plan_option is None:
            self.plans, self.why_layers = plans_for(model, tp)
        if not self.plans:
            self.plan = chosen_plan(model, self.plan_option, tp)
        self.peer_sums: PeerSums | None = None
        self.tries_plan = self.plan is not None or any(map(is_of_user, self.plans.values()))
        if self.plan is not None:
            require_sample(self, self.plan)
            divided = {name: model.get_submodule(name) for name in self.plan.divided}
            self.layers = divided
            self.replicated = [
                name
                for name, layer in model.named_modules()
                if isinstance(layer, nn.Conv2d | nn.Linear | nn.Embedding) and name not in divided
            ]
        elif self.plans:
            self.layers = dict[str, nn.Module]()
            for name, block in self.plans.items():
                for path, word in (plan_of(block) or {}).items():
                    if word in ("column", "heads", "row"):
                        self.layers[f"{name}.{path}"] = block.get_submodule(path)
            self.replicated = [name for name, _ in model.named_children() if name not in self.plans]
        else:
            self._choose_layers(model)

        if self.written:
            from ddp_lab.strategies.written_weights import refuse_sharded

            refuse_sharded(self, self.layers)
        if any(isinstance(layer, nn.Conv2d) for layer in self.layers.values()):
            self.unsupported["compile"] = "torch.compile cannot trace sharded convolutions"

    def _choose_layers(self, model: nn.Module) -> None:
        """Choose the layers that are sharded one by one."""
        tied = {name.rpartition(".")[0] for names in tied_parameters(model) for name in names}
        layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Conv2d | nn.Linear)
        }

        size = self.axes["tp"]
        excluded = tied | self._used_directly(model, layers)
        self.layers = {
            name: layer
            for name, layer in layers.items()
            if can_be_sharded(layer, size) and name not in excluded
        }
        self.replicated = [name for name in layers if name not in self.layers]
        if size > 1 and not self.layers:
            raise ConfigError(
                f"strategy.tp={size}: no layer of the model can be sharded: {size} must divide the "
                "channels or units of one that is computed as torch does, is called, and shares "
                "no weights. Use another strategy.tp, or strategy=ddp"
            )

    def _used_directly(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> set[str]:
        """Return the layers that the model does not call, or whose parameters it uses elsewhere.

        Without an example, or if the model cannot run here, none are known. A step then ends in the
        message of `explain_direct_use`.
        """
        usage = None
        if self.axes["tp"] > 1 and self.example is not None:
            usage = find_usage(model, self.example)
        if usage is None:
            return set()
        return {
            name
            for name, layer in layers.items()
            if name not in usage.called
            or any(
                name not in usage.within.get(f"{name}.{own_name}", {name})
                for own_name, _ in layer.named_parameters()
            )
        }

    def setup(self, model: nn.Module) -> None:
        mesh = self.runtime.mesh(self.axes)
        self.dp_group = mesh.get_group("dp")
        model = self.to_device(model)
        self.module = set_batch_norm(model, self.batch_norm, self.dp_group)
        self.forward = self.module
        if self.plans:
            group, self.peer_sums = make_group(mesh["tp"].get_group(), False, self.device)
            self.runtime.keep(self.peer_sums)
            self._divide_blocks(model, mesh["tp"], group)
            return
        if self.plan is not None:
            self._apply(self.plan, model, mesh["tp"])
            return

        for layer in self.layers.values():
            if isinstance(layer, nn.Linear):
                style = ColwiseParallel(output_layouts=Replicate())
                parallelize_layer(layer, mesh["tp"], style)
            elif isinstance(layer, nn.Conv2d):
                shard_channels(layer, mesh["tp"])

    def _apply(self, plan: ModulePlan, model: nn.Module, mesh: DeviceMesh) -> None:
        """Divide the model by a plan, in place, and compare it with the undivided one."""
        from ddp_lab.strategies.plan_trial import begin_trial

        self.summed = [
            parameter
            for name in plan.with_word("summed")
            for parameter in model.get_submodule(name).parameters()
        ]
        self.tp_group = mesh.get_group()
        trial = begin_trial(self, model, plan.key, plan.remedy, plan.words)
        apply_plan(model, plan, mesh)
        if trial is not None:
            trial.compare(self._sum_along_tp)

    def _divide_blocks(self, model: nn.Module, mesh: DeviceMesh, group: TokenGroup) -> None:
        """Divide blocks by the plans of their classes, and try those of the user."""
        others = {name: block for name, block in self.plans.items() if is_of_user(block)}
        trial = None
        if others:
            from ddp_lab.strategies.plan_trial import BLOCK_REMEDY, begin_trial, key_of_blocks

            words = {
                f"{name}.{path}": word
                for name, block in others.items()
                for path, word in (plan_of(block) or {}).items()
            }
            key = key_of_blocks(others.values())
            trial = begin_trial(self, model, key, BLOCK_REMEDY, words)
        for block in self.plans.values():
            divide(block, mesh, group, replicate=False)
        if trial is not None:
            self._begin()
            trial.compare(self._sum_along_tp)

    def _sum_along_tp(self) -> None:
        """Sum the parts of gradients that each rank has of its own units or words."""
        for parameter in self.module.parameters() if self.plan is not None else ():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                # that of an embedding is one part of a sum
                placements = cast(DTensor, parameter).placements
                parameter.grad = gradient.redistribute(placements=placements)
        for parameter in self.summed:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.tp_group)

    def add_gradient(
        self, inputs: Tree, targets: Tree, num_valid: int, divisor: float | torch.Tensor
    ) -> torch.Tensor:
        self._begin()
        with explain_direct_use():
            return super().add_gradient(inputs, targets, num_valid, divisor)

    def predict(self, inputs: Tree) -> Any:
        self._begin()
        with explain_direct_use():
            return super().predict(inputs)

    def _begin(self) -> None:
        if self.peer_sums is not None:
            self.peer_sums.begin()

    def describe(self) -> str:
        layout = f"tp on {self.where}: dp {self.dp_size} x tp {self.axes['tp']}"
        if self.plan is not None:
            return (
                f"{layout}; {count(len(self.layers), 'layer')} sharded by {self.plan.key}, "
                f"{some(self.replicated) or 'no layer'} replicated"
            )
        if self.plans:
            blocks = (
                f"{count(len(self.plans), 'block')} sharded in pairs of layers, "
                f"{some(self.replicated) or 'no block'} replicated"
            )
            return f"{layout}; {blocks}"
        return (
            f"{layout}; {self.why_layers}, so {count_with_verb(len(self.layers), 'layer')} "
            f"sharded by output channels and units, {some(self.replicated) or 'no layer'} "
            "replicated"
        )

    def reduce_gradients(self) -> None:
        self._sum_along_tp()
        if self.dp_size > 1:
            with every_gradient(self):
                gradients = [
                    local(gradient) for gradient in all_gradients_of(self.module.parameters())
                ]
                # In place, because some of the gradients are the shards of DTensors. torch has no
                # public form of this function.
                torch._foreach_copy_(gradients, flat(gradients, self.dp_group))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    def gradient_norm(self) -> torch.Tensor:
        # Each rank holds a shard of the sharded gradients. Replicated gradients are complete on
        # every rank and must count once; a row layer's bias is one of them, as a DTensor.
        gradients = [
            parameter.grad for parameter in self.module.parameters() if parameter.grad is not None
        ]
        sharded = [gradient for gradient in gradients if is_sharded(gradient)]
        replicated = [local(gradient) for gradient in gradients if not is_sharded(gradient)]
        norms = [get_total_norm(kind) for kind in (sharded, replicated) if kind]
        norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        # all parameters here may be frozen
        return torch.stack([torch.zeros((), device=self.device), *norms]).norm()


def is_sharded(gradient: torch.Tensor) -> bool:
    """Return whether a rank has a shard of a gradient."""
    return isinstance(gradient, DTensor) and any(place.is_shard() for place in gradient.placements)
