"""A model that is no Chain, cut into stages on the devices of one process by a trace.

Each parameter is on the device of the first stage that uses it. Another stage that uses it, too,
such as a head that is tied to the embedding, copies it in every forward pass; autograd adds the
gradient of the copy.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from ddp_lab.data.trees import Tree, rows, size, to
from ddp_lab.models.calls import arguments_of
from ddp_lab.models.cut_points import CutPoints
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.stage_shapes import BatchKey, StageShapes
from ddp_lab.strategies.stage_weights import StageWeights
from ddp_lab.strategies.traced import Blueprint, Traced, bind
from ddp_lab.strategies.traced_model import require_example, require_traceable
from ddp_lab.strategies.traced_values import TracedStage

# `Strategy.measure` of one task
MeasureOutputs = Callable[[Any, Tree, int, float | torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class PlacedStage(NamedTuple):
    """A stage on its device.

    Attributes:
        stage: whose graph uses the parameters and buffers of the model.
        device: of the stage.
        elsewhere: parameters and buffers that are on another device, by their names in `stage`.
    """

    stage: TracedStage
    device: torch.device
    elsewhere: dict[str, torch.Tensor]

    def __call__(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return what the stage passes on, for what it gets."""
        arguments = tuple(value.to(self.device, non_blocking=True) for value in values)
        if not self.elsewhere:
            return self.stage(*arguments)
        copies = {
            name: tensor.to(self.device, non_blocking=True)
            for name, tensor in self.elsewhere.items()
        }
        return functional_call(self.stage, copies, arguments)


class Prepared(NamedTuple):
    """The stages for the micro-batches of one form, in one mode.

    Attributes:
        stages: in their order.
        form: of the outputs.
    """

    stages: list[PlacedStage]
    form: TreeSpec


class TracedSplit:
    """The stages of a model that is cut by a trace.

    Args:
        strategy: in `partition`.
        model: complete.
        devices: of the stages.
        samples: in a local batch.

    Attributes:
        parts: the cut.

    Raises:
        ConfigError: there is no example, the model has hooks, or it cannot be traced or cut.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        devices: Sequence[torch.device],
        samples: int,
    ):
        example = require_example(strategy)
        self.strategy_name = strategy.name
        self.require_no_hooks(model)
        self.devices = devices
        self.autocast = strategy.autocast
        self.num_microbatches = strategy.num_microbatches
        self.shapes = StageShapes(self.num_microbatches)
        self._prepared: dict[BatchKey, Prepared] = {}
        # Operations that make a tensor, such as arange, do so on the device of the trace.
        self._blueprints = {
            device: Blueprint(model, device, strategy.autocast, strategy.name)
            for device in dict.fromkeys(devices)
        }
        blueprint = self._blueprints[devices[0]]
        self.parts: CutPoints = blueprint.cut(example, len(devices))
        like = blueprint.inputs(example, -(-samples // self.num_microbatches))
        self._used = blueprint.used_by_stages(like, self.parts.starts)
        # which refuses statistics that several stages would change
        StageWeights(blueprint.model, self._used, len(devices), strategy.name)

    def require_no_hooks(self, model: nn.Module) -> None:
        """Raise a ConfigError if a module of the model has what a trace would call once only."""
        require_traceable(model, self.strategy_name)

    def place(self, model: nn.Module) -> nn.Module:
        """Move each parameter and buffer to the device of the first stage that uses it."""
        tensors = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))
        places: dict[int, torch.device] = {}
        for names, device in zip(self._used, self.devices, strict=True):
            for name in sorted(names & tensors.keys()):
                places.setdefault(id(tensors[name]), device)
        for tensor in tensors.values():
            tensor.data = tensor.data.to(places.get(id(tensor), self.devices[0]))
        self.model = model
        return model

    def prepare(self, inputs: Tree, training: bool) -> tuple[Prepared, torch.Tensor]:
        """Return the stages for a batch, and the row that each row of the padded batch repeats.

        Raises:
            ConfigError: the model does not support it, or it is the first one of too many shapes.
        """
        key = self.shapes.key_of(inputs, training)
        if key not in self._prepared:
            self._prepared[key] = self._make_stages(inputs, key.samples, training)
        repeated = torch.arange(key.samples * self.num_microbatches) % size(inputs)
        return self._prepared[key], repeated

    def _make_stages(self, inputs: Tree, samples: int, training: bool) -> Prepared:
        traces: dict[torch.device, Traced] = {}
        for device, blueprint in self._blueprints.items():
            like = blueprint.inputs(inputs, samples)
            traces[device] = blueprint.trace(like, self.parts.starts, training)
        stages = [
            self._placed(traces[device].stages[index], device)
            for index, device in enumerate(self.devices)
        ]
        return Prepared(stages, traces[self.devices[0]].form)

    def _placed(self, stage: TracedStage, device: torch.device) -> PlacedStage:
        bind(stage.graph, self.model, device)
        named = [
            *stage.named_parameters(remove_duplicate=False),
            *stage.named_buffers(remove_duplicate=False),
        ]
        elsewhere = {name: tensor for name, tensor in named if tensor.device != device}
        return PlacedStage(stage, device, elsewhere)

    def run(self, prepared: Prepared, inputs: Tree) -> list[torch.Tensor]:
        """Return the tensors of the outputs for a micro-batch, on the last device."""
        values: Sequence[torch.Tensor] = tree_leaves(arguments_of(inputs))
        with self.autocast():
            for stage in prepared.stages:
                values = stage(values)
        return list(values)

    def add_gradient(
        self,
        inputs: Tree,
        targets: Tree,
        num_valid: int,
        divisor: float | torch.Tensor,
        measure: MeasureOutputs,
    ) -> torch.Tensor:
        """Add the gradient of a batch to `.grad`, and return its sums, as `Strategy.add_gradient`.

        Args:
            inputs, targets, num_valid, divisor: as there.
            measure: `Strategy.measure` of a task whose tensors are on the last device.
        """
        prepared, repeated = self.prepare(inputs, training=True)
        targets = to(targets, self.devices[-1])
        losses: list[torch.Tensor] = []
        results: list[torch.Tensor] = []
        for index in repeated.chunk(self.num_microbatches):
            num_samples = min(num_valid, len(index))
            num_valid -= num_samples
            tensors = self.run(prepared, rows(inputs, index.to(device_of(inputs))))
            num_rows = max(num_samples, 1)  # `measure` cannot cut padding from all outputs
            outputs = tree_unflatten([tensor[:num_rows] for tensor in tensors], prepared.form)
            expected = rows(targets, index[:num_rows].to(self.devices[-1]))
            loss, sums = measure(outputs, expected, num_samples, divisor)
            losses.append(loss)
            results.append(sums)
        reduce(torch.add, losses).backward()
        return reduce(torch.add, results)

    def predict(self, inputs: Tree) -> Any:
        """Return the outputs, of which every tensor is [b, ...], on the first device."""
        prepared, repeated = self.prepare(inputs, training=False)
        parts = [
            self.run(prepared, rows(inputs, index.to(device_of(inputs))))
            for index in repeated.chunk(self.num_microbatches)
        ]
        samples = size(inputs)
        first = self.devices[0]
        joined = [torch.cat(tensors)[:samples].to(first) for tensors in zip(*parts, strict=True)]
        return tree_unflatten(joined, prepared.form)


def device_of(inputs: Tree) -> torch.device:
    """Return the device of the tensors of a batch."""
    return tree_leaves(arguments_of(inputs))[0].device
