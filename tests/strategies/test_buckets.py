"""The pieces of a model and the buckets of gradients that are sent during the backward pass."""

import pytest

from ddp_lab.models.resnet import resnet18
from ddp_lab.strategies.buckets import MiB
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
    assert all(sum(parameter.nbytes for parameter in piece.parameters()) >= min(sizes) for piece in pieces[1:])
    assert Scratch(Runtime("cpu"), "bucketed", 50, "local", False).bucket_sizes == (50 * MiB, MiB), (
        "the bucket sent last is small"
    )
