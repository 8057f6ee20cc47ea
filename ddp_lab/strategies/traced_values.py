"""The stages of a trace, and the values that they pass on.

A value that a stage computes may be needed by any stage after it. All stages between them pass it
on, so that only neighbours communicate, as all schedules require.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


class TracedStage(nn.Module):
    """A stage. It gets all values that it or a later stage needs, and returns those that follow.

    So only neighbours communicate, as all schedules require.

    Args:
        graph: the operations of the stage.
        received: names of the values that it gets.
        arguments: those of them that `graph` gets, in its order.
        computed: by the name of a value, its place in what `graph` returns; None: it is returned
            alone.
        returned: names of the values that it returns.
        examples: values without data, by name.
    """

    def __init__(
        self,
        graph: nn.Module,
        received: Sequence[str],
        arguments: Sequence[str],
        computed: Mapping[str, int | None],
        returned: Sequence[str],
        examples: Mapping[str, torch.Tensor],
    ):
        super().__init__()
        self.graph = graph
        self._received = received
        self._arguments = arguments
        self._computed = computed
        self._returned = returned
        self.inputs = [examples[name] for name in received]
        self.outputs = [examples[name] for name in returned]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Copies, because the first operation may change a received tensor in place, which autograd
        # refuses for a leaf; and because torch 2.11 cannot cut the backward pass of a stage that
        # returns its own input.
        copies = [tensor.clone() if tensor.requires_grad else tensor for tensor in tensors]
        values = dict(zip(self._received, copies, strict=True))
        results = self.graph(*(values[name] for name in self._arguments))
        for name, place in self._computed.items():
            values[name] = results if place is None else results[place]
        return tuple(values[name].contiguous() for name in self._returned)


class Values:
    """The values between the stages of torch's Pipe, by name: the inputs, and what stages return.

    Attributes:
        calls: nodes of the stages, in their order.
        made_by: number of the stage that returns a value; -1: it is one of the inputs.
        places: its place among what the stage returns; None: it is returned alone.
        needed_by: number of the last stage that gets it; that after the last one for outputs.
        examples: without data.
        outputs: names of the outputs.
    """

    def __init__(self, pipe: Any):
        self.calls: list[Any] = []
        self.made_by: dict[str, int] = {}
        self.places: dict[str, int | None] = {}
        self.needed_by: dict[str, int] = {}
        self.examples: dict[str, torch.Tensor] = {}
        self.outputs: list[str] = []
        results: dict[Any, Any] = {}
        for node in pipe.split_gm.graph.nodes:
            if node.op == "placeholder":
                self._add(node.name, -1, None, node.meta["val"])
                self.needed_by[node.name] = 0
            elif node.op == "call_module":
                for value in node.args:
                    self.needed_by[value.name] = len(self.calls)
                results[node] = results_of(pipe.split_gm.get_submodule(node.target))
                if not isinstance(results[node], (tuple, list)):
                    self._add(node.name, len(self.calls), None, results[node])
                self.calls.append(node)
            elif node.op == "call_function":  # takes one of several results
                call, place = node.args
                self._add(node.name, self.calls.index(call), place, results[call][place])
            elif node.op == "output":
                returned = node.args[0]
                values = returned if isinstance(returned, (tuple, list)) else [returned]
                self.outputs = [value.name for value in values]
        for name in self.outputs:
            self.needed_by[name] = len(self.calls)

    def _add(self, name: str, made_by: int, place: int | None, example: torch.Tensor) -> None:
        self.made_by[name] = made_by
        self.places[name] = place
        self.examples[name] = example

    def before(self, stage: int) -> list[str]:
        """Return the names of the values that a stage or a later one needs of those before it."""
        if stage == len(self.calls):
            return self.outputs
        return [
            name
            for name, made_by in self.made_by.items()
            if made_by < stage <= self.needed_by.get(name, -1)
        ]


def stages_of(pipe: Any) -> list[TracedStage]:
    """Return the stages of torch's Pipe, in which a stage may get values of any stage before it."""
    values = Values(pipe)
    return [
        TracedStage(
            pipe.get_stage_module(index),
            values.before(index),
            [value.name for value in call.args],
            {name: values.places[name] for name, by in values.made_by.items() if by == index},
            values.before(index + 1),
            values.examples,
        )
        for index, call in enumerate(values.calls)
    ]


def results_of(stage: Any) -> Any:
    """Return what a stage of torch's Pipe returns, without data: a tensor, or a tuple of some."""
    (output,) = [node for node in stage.graph.nodes if node.op == "output"]
    returned = output.args[0]
    if isinstance(returned, (tuple, list)):
        return tuple(node.meta["val"] for node in returned)
    return returned.meta["val"]
