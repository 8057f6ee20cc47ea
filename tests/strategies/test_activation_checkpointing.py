"""Activation checkpointing: what the backward pass computes again, and which models are refused."""

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training import make_model

from ddp_lab.config.errors import ConfigError
from ddp_lab.strategies.activation_checkpointing import checkpointed
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.world.runtime import Runtime


class Counter(TorchDispatchMode):
    """Count the calls of each operation."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.calls[function] += 1
        return function(*arguments, **keywords or {})


def backward_of_block(mode: str) -> tuple[list[int], list[torch.Tensor]]:
    """Return how often the backward pass of a block calls forward operations of each kind, and its gradients."""
    block = make_model("vit", 0).block0
    torch.manual_seed(0)
    output = checkpointed(block, mode)(torch.randn(2, 16, 16, requires_grad=True))
    with Counter() as counter:
        output.sum().backward()
    aten = torch.ops.aten
    kinds = aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default, aten.native_layer_norm.default
    return [counter.calls[kind] for kind in (*kinds, aten.gelu.default)], [parameter.grad for parameter in block.parameters()]


def test_backward_pass_computes_the_block_again_without_matrix_multiplications_if_selective():
    (kept, gradients), (block, block_gradients), (selective, selective_gradients) = map(
        backward_of_block, ("none", "block", "selective")
    )
    assert kept == [0, 0, 0, 0]
    assert block == [5, 1, 2, 1]  # the result of the sixth layer, fc2, is not needed
    assert selective == [0, 0, 2, 1]
    for one, other, third in zip(gradients, block_gradients, selective_gradients, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (make_model("narrow", 0), "strategy.checkpoint_activations=block: is not supported by models with BatchNorm, whose"),
        (torch.nn.Linear(2, 2), "strategy.checkpoint_activations=block: needs a model that is a Chain of blocks, got Linear"),
    ],
)
def test_models_that_cannot_be_computed_twice_or_have_no_blocks_are_refused(model, message):
    strategy = FSDP(Runtime("cpu"), True, "local", None, "block")
    with pytest.raises(ConfigError) as caught:
        strategy.partition(model, 8)
    assert message in str(caught.value)
