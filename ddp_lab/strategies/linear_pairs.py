"""The linear layers of a pair: the first is divided by units (column), the second by inputs (row).

    forward   tokens -- column: own units -- ... -- row: sum over own units -- all_reduce --> tokens
    backward  their gradient <-- all_reduce -- column <-- ... <-- row <-- gradient of the tokens

The all_reduce of the backward pass runs while the gradients of the column layer's weights are
computed, and that of the forward pass while the row layer computes its next chunk. Layers that get
the same tokens, such as query, key and value, are computed by one matrix multiplication: narrow
ones do not fill a GPU, and their gradients of the tokens are summed before they are sent.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from ddp_lab.strategies.activation_sums import TokenGroup, finish_sum, gather, start_sum

CHUNKS = 2  # of a batch, of which the sum of one is under way while a row layer computes the next


def own_part(parameter: torch.Tensor, partial: bool = False) -> torch.Tensor:
    """Return this rank's part of a parameter of a divided layer.

    torch.compile traces this method only if it is called so.

    Args:
        partial: whether the gradient is one part of a sum over the ranks, of a parameter that is
            not divided.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()]) if partial else parameter.to_local()


def weight_and_bias(layer: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return this rank's part of a layer."""
    bias = cast("torch.Tensor | None", layer.bias)
    return own_part(layer.weight), None if bias is None else own_part(bias)


def as_computed(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors in the dtype of the matrix multiplications: that of autocast, if it is on."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]


class Enter(torch.autograd.Function):
    """All tokens for those of the rank; in the backward pass the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, group: TokenGroup) -> torch.Tensor:
        ctx.group = group
        complete = gather(tokens, group)
        return complete.view_as(complete)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = gradients[0].contiguous()
        return finish_sum([gradient], [start_sum(gradient, ctx.group)], ctx.group), None


class Column(torch.autograd.Function):
    """Some units of a linear layer: `complete @ weight.T + bias`, [b, n, units].

    Args of `forward`:
        tokens: those that the rank has; they get the gradient.
        complete: all tokens, [b, n, width].
        weight: [units, width].
        bias: [units], or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        complete: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: TokenGroup,
    ) -> torch.Tensor:
        ctx.save_for_backward(complete, weight)
        ctx.group = group
        return F.linear(complete, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = gradients[0]
        complete, weight = ctx.saved_tensors
        of_tokens, _, of_weight, of_bias, _ = ctx.needs_input_grad
        input_gradient = gradient @ weight
        started = start_sum(input_gradient, ctx.group) if of_tokens else input_gradient
        # Computed while the ranks send.
        rows = gradient.flatten(0, -2)
        to_weight = rows.t() @ complete.flatten(0, -2) if of_weight else None
        to_bias = rows.sum(0) if of_bias else None
        to_tokens = finish_sum([input_gradient], [started], ctx.group) if of_tokens else None
        return to_tokens, None, to_weight, to_bias, None


class Row(torch.autograd.Function):
    """The sum over the ranks of `inputs @ weight.T`: the tokens that the rank has.

    Args of `forward`:
        inputs: of this rank, [b, n, units].
        weight: [width, units].
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, group: TokenGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.group = group
        addends: list[torch.Tensor] = []
        started: list[torch.Tensor] = []
        for chunk in inputs.chunk(CHUNKS if group.peers else 1):
            addends.append(F.linear(chunk, weight))
            started.append(start_sum(addends[-1], group))
        return finish_sum(addends, started, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        of_inputs, of_weight, _ = ctx.needs_input_grad
        gradient = gather(gradients[0], ctx.group)
        to_inputs = gradient @ weight if of_inputs else None
        to_weight = gradient.flatten(0, -2).t() @ inputs.flatten(0, -2) if of_weight else None
        return to_inputs, to_weight, None


class ColumnLinear(nn.Linear):
    """A linear layer with some units on this rank: a layer of torch after `divide_linear`."""

    together: "Together"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the units of this rank, [b, n, units], for tokens, [b, n, width]."""
        return self.together.compute(self, input)


class RowLinear(nn.Linear):
    """A linear layer with weights of some inputs on this rank: torch's after `divide_linear`."""

    group: TokenGroup

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rank's tokens, [b, n, width], for the inputs of this rank, [b, n, units].

        Collective.
        """
        outputs = Row.apply(*as_computed(input, own_part(self.weight)), self.group)
        bias = cast("torch.Tensor | None", self.bias)
        if bias is None:
            return outputs
        # With sequence parallelism its gradient is that of the rank's tokens.
        return outputs + own_part(bias, self.group.share_tokens).to(outputs.dtype)


class Together:
    """Column layers that get the same tokens: those below a module that gathers them, or one.

    Args:
        group: the ranks that share the layers.

    Attributes:
        layers: the layers.
    """

    def __init__(self, group: TokenGroup):
        self.group = group
        self.layers: list[ColumnLinear] = []
        self._tokens: torch.Tensor | None = None  # that the rank has, of the call that is under way
        self._complete: torch.Tensor | None = None  # all of them, which the module got
        self._outputs: list[torch.Tensor] = []  # of all layers

    def enter(
        self, module: nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Give a module all tokens in place of those that the rank has: a forward pre-hook."""
        tokens, *others = inputs
        if self.group.share_tokens:  # autocast leaves a normalization's outputs in float32
            (tokens,) = as_computed(tokens)
        complete: Any = Enter.apply(tokens, self.group)
        self._tokens = tokens
        self._complete = complete
        self._outputs = []
        return complete, *others

    def leave(
        self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> None:
        """Free what `enter` has kept: a forward hook."""
        self._tokens = None
        self._complete = None
        self._outputs = []

    def compute(self, layer: ColumnLinear, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of a layer.

        Compute those of the others at once if the module's tokens are its inputs.
        """
        if self._tokens is None or self._complete is None:
            (tokens,) = as_computed(inputs)
            return self._columns([layer], tokens, gather(tokens.detach(), self.group))[0]
        # the module has computed them; their gradient is summed where it got the tokens
        if inputs is not self._complete:
            return F.linear(inputs, *weight_and_bias(layer))
        if not self._outputs:
            self._outputs = self._columns(self.layers, self._tokens, self._complete.detach())
        return self._outputs[self.layers.index(layer)]

    def _columns(
        self, layers: Sequence[ColumnLinear], tokens: torch.Tensor, complete: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the outputs of layers for the same tokens.

        Args:
            tokens: those that the rank has.
            complete: all tokens.
        """
        parts = [weight_and_bias(layer) for layer in layers]
        sizes = [len(weight) for weight, _ in parts]
        weight, bias = parts[0]
        if len(parts) > 1:
            weight = torch.cat([weight for weight, _ in parts])
            if any(bias is not None for _, bias in parts):
                bias = torch.cat(
                    [
                        weight.new_zeros(len(weight)) if bias is None else bias
                        for weight, bias in parts
                    ]
                )

        if bias is not None:
            (bias,) = as_computed(bias)
        outputs: Any = Column.apply(*as_computed(tokens, complete, weight), bias, self.group)
        return list(outputs.split(sizes, -1))
