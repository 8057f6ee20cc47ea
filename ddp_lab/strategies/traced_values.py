"""The stages of a trace, and the values that they pass on.

A value that a stage computes may be needed by any stage after it. All stages between them pass it
on, so that only neighbours communicate, as all schedules require.

Stages of torch 2.11 expect a gradient of every value that they pass on. So integers and booleans
travel as floating-point numbers that represent them exactly, and get gradients of 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

CARRIERS = {torch.bool: torch.bfloat16, torch.uint8: torch.bfloat16, torch.int8: torch.bfloat16}


def as_sent(value: torch.Tensor) -> torch.Tensor:
    """Return a value of a trace as it travels between stages.

    Integers from 2^53 on, which no position, mask or token reaches, would be rounded.
    """
    if value.is_floating_point() or value.is_complex():
        return value
    return value.to(CARRIERS.get(value.dtype, torch.float64))


class ZeroGradients(torch.autograd.Function):
    """The identity of a tensor. In the backward pass further tensors get gradients of 0."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*others)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], *(torch.zeros_like(other) for other in ctx.saved_tensors)


class TracedStage(nn.Module):
    """A stage. It gets all values that it or a later stage needs, and returns those that follow.

    So only neighbours communicate, as all schedules require.

    Args:
        graph: the operations of the stage.
        received: values that it gets, as they arrive, without data, by name.
        arguments: those of them that `graph` gets, in its order.
        computed: by the name of a value, its place in what `graph` returns; None: it is returned
            alone.
        returned: names of the values that it returns.
        examples: values without data, by name.
    """

    def __init__(
        self,
        graph: nn.Module,
        received: Mapping[str, torch.Tensor],
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
        self._dtypes = [examples[name].dtype for name in received]
        self.inputs = [*received.values()]
        self.outputs = [as_sent(examples[name]) for name in returned]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Copies, because the first operation may change a received tensor in place, which autograd
        # refuses for a leaf; and because torch 2.11 cannot cut the backward pass of a stage that
        # returns its own input.
        copies = [
            (tensor.clone() if tensor.requires_grad else tensor).to(dtype)
            for tensor, dtype in zip(tensors, self._dtypes, strict=True)
        ]
        values = dict(zip(self._received, copies, strict=True))
        results = self.graph(*(values[name] for name in self._arguments))
        for name, place in self._computed.items():
            values[name] = results if place is None else results[place]
        returned = [as_sent(values[name]).contiguous() for name in self._returned]
        return self._with_gradients(tensors, returned)

    def _with_gradients(
        self, tensors: Sequence[torch.Tensor], returned: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return tensors whose backward pass gives received numbers of a mask gradients of 0.

        Args:
            tensors: those that the stage got.
            returned: what it returns.
        """
        sent_as_others = [
            tensor
            for tensor, dtype in zip(tensors, self._dtypes, strict=True)
            if tensor.requires_grad and tensor.dtype != dtype
        ]
        if sent_as_others:
            first = next(place for place, each in enumerate(returned) if each.requires_grad)
            returned[first] = cast(
                "torch.Tensor", ZeroGradients.apply(returned[first], *sent_as_others)
            )
        return tuple(returned)


def constants_of(pipe: Any) -> list[Any]:
    """Return the outputs of a trace that are no tensors, such as numbers and None.

    Args:
        pipe: of torch.distributed.pipelining.
    """
    (node,) = pipe.split_gm.graph.find_nodes(op="output")
    returned = node.args[0]
    values = returned if isinstance(returned, (tuple, list)) else [returned]
    return [value for value in values if not isinstance(value, torch.fx.Node)]


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

    def received_by(self, stage: int) -> dict[str, torch.Tensor]:
        """Return the values that a stage gets, without data, as they arrive."""
        examples = {name: self.examples[name] for name in self.before(stage)}
        if stage == 0:  # they are the inputs of the model
            return examples
        return {name: as_sent(example) for name, example in examples.items()}


def stages_of(pipe: Any) -> list[TracedStage]:
    """Return the stages of torch's Pipe, in which a stage may get values of any stage before it."""
    values = Values(pipe)
    return [
        TracedStage(
            graph=pipe.get_stage_module(index),
            received=values.received_by(index),
            arguments=[value.name for value in call.args],
            computed={
                name: values.places[name] for name, by in values.made_by.items() if by == index
            },
            returned=values.before(index + 1),
            examples=values.examples,
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
