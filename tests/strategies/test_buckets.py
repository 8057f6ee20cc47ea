"""The pieces of a model and the buckets of gradients that are sent during the backward pass."""

from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.models.resnet import resnet18
from ddp_lab.strategies.buckets import Buckets, MiB
from ddp_lab.strategies.scratch import Scratch
from ddp_lab.world.runtime import Runtime


@pytest.mark.parametrize(
    ("sizes", "starts"),
    [
        ((25 * MiB,), ["stem", "layer4_0"]),
        ((25 * MiB, MiB), ["stem", "layer2_0", "layer4_0"]),
        ((1000 * MiB, MiB), ["stem", "layer2_0"]),
    ],
)
def test_chain_pieces_are_cut_at_the_bucket_size(sizes, starts):
    chain = resnet18(1, 28, 10, None)
    names = {block: name for name, block in chain.named_children()}
    pieces = chain.pieces(*sizes)
    assert [names[piece[0]] for piece in pieces] == starts
    assert [block for piece in pieces for block in piece] == list(chain)
    assert all(
        sum(parameter.nbytes for parameter in piece.parameters()) >= min(sizes)
        for piece in pieces[1:]
    )
    assert Scratch(Runtime("cpu"), "bucketed", 50, "local", False).bucket_sizes == (
        50 * MiB,
        MiB,
    ), "the bucket sent last is small"


def test_buckets_are_summed_while_the_backward_pass_computes_the_others(monkeypatch):
    """Each bucket is sent before the gradient of the layer before it is known."""
    layers = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    sent = []

    def all_reduce(tensor: torch.Tensor, async_op: bool) -> MagicMock:
        assert async_op
        sent.append([layer.weight.grad is not None for layer in layers])
        return MagicMock()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    buckets = Buckets([[layer.weight] for layer in reversed(layers)])
    for _ in range(2):  # a second step begins as the first one
        for layer in layers:
            layer.weight.grad = None
        sent.clear()
        nn.Sequential(*layers)(torch.ones(1, 2)).sum().backward()
        assert sent == [[False, False, True], [False, True, True], [True, True, True]]
        buckets.finish()
        assert len(sent) == 3
