"""The shapes and dtypes of a chain's activations for any inputs, computed without values."""

import copy
from typing import NamedTuple

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.models.chain import Chain
from ddp_lab.models.kept_state import state_kept
from ddp_lab.models.trial import meta_copy


class Form(NamedTuple):
    """The shape and the dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        """Return the form of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{list(self.shape)} ({str(self.dtype).removeprefix('torch.')})"


class Block(NamedTuple):
    """A copy of a block, and the device on which it can run: meta, or the CPU.

    A block that reads values, as by `.item()`, runs on the CPU.
    """

    name: str
    module: nn.Module
    device: str


class Boundaries:
    """The forms of the activations before each block of a chain, and after the last one.

    It keeps a copy of the chain on the meta device, where tensors have no values and take no
    memory. Of a block that reads values it keeps a copy with weights, in host memory.

    Args:
        chain: the complete model, on the CPU or on the meta device. It may be changed afterwards.
        example: form of a batch that the chain supports.

    Raises:
        ConfigError: the chain does not support the example.
    """

    def __init__(self, chain: Chain, example: Form):
        self.example = example
        self._blocks: list[Block] = []
        self._known: dict[Form, list[Form]] = {}
        activation = empty(example)
        for name, module in chain.named_children():
            block, output = copied(name, module, activation)
            activation = self._run(block, activation, example) if output is None else output
            self._blocks.append(block)

    def of(self, inputs: Form) -> list[Form]:
        """Return the form of the activation before each block and after the last, for a batch.

        Raises:
            ConfigError: a block does not support what it would get.
        """
        if inputs not in self._known:
            activation = empty(inputs)
            activations = [inputs]
            for block in self._blocks:
                activation = self._run(block, activation, inputs)
                activations.append(Form.of(activation))
            self._known[inputs] = activations
        return self._known[inputs]

    def _run(self, block: Block, activation: torch.Tensor, inputs: Form) -> torch.Tensor:
        try:
            return run(block, activation)
        except Exception as error:
            raise ConfigError(
                f"the model does not support a batch of inputs {inputs}: {block.name} fails for "
                f"{Form.of(activation)}: {describe_error(error)}. The batch of the example is "
                f"{self.example}; use inputs that the model supports"
            ) from None


def copied(
    name: str, module: nn.Module, activation: torch.Tensor
) -> tuple[Block, torch.Tensor | None]:
    """Return a copy of a block that can run, and its output, if that is known."""
    block = Block(name, meta_copy(module).eval(), "meta")
    if any(tensor.is_meta for tensor in module.parameters()):
        return block, None  # there are no values
    try:
        return block, run(block, activation)
    # it may read values; if this is another error, the copy with values raises it again
    except Exception:
        return Block(name, copy.deepcopy(module).eval(), "cpu"), None


def empty(form: Form) -> torch.Tensor:
    """Return a tensor of a form on the meta device."""
    return torch.empty(form.shape, dtype=form.dtype, device="meta")


@torch.no_grad()
def run(block: Block, activation: torch.Tensor) -> torch.Tensor:
    """Return the output of a block, on the meta device, for an input there.

    Raises:
        TypeError: the output is no tensor.
    """
    if block.device == "meta":
        inputs = activation
    else:
        inputs = torch.ones_like(activation, device=block.device)
    with state_kept(block.module, weights=False):
        output = block.module(inputs)
    if not isinstance(output, torch.Tensor):
        raise TypeError(f"it must return a tensor, got {type(output).__name__}")
    return output.to("meta")
