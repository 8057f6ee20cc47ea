"""Functions over nested batches: the same as those of torch for a tensor, in each of them."""

import pytest
import torch

from ddp_lab.data.parts import divide
from ddp_lab.data.trees import chunk, pad, rows, size, to

TENSOR = torch.arange(10.0).view(5, 2)
TREES = {
    "tensor": TENSOR,
    "tuple": (TENSOR, TENSOR + 1),
    "dict": {"a": TENSOR, "b": (TENSOR + 1, {"c": TENSOR + 2})},
}


def tensors_of(tree) -> list[torch.Tensor]:
    """Return the tensors of a tree, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [tensor for part in parts for tensor in tensors_of(part)]


def form_of(tree) -> object:
    """Return a tree of the same form without tensors."""
    if isinstance(tree, torch.Tensor):
        return None
    if isinstance(tree, dict):
        return {key: form_of(part) for key, part in tree.items()}
    return tuple(form_of(part) for part in tree)


def require_equal(tree, expected: list[torch.Tensor], like) -> None:
    assert form_of(tree) == form_of(like)
    for tensor, wanted in zip(tensors_of(tree), expected, strict=True):
        assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_functions_apply_to_each_tensor(tree):
    tensors = tensors_of(tree)
    assert size(tree) == 5
    require_equal(rows(tree, slice(3)), [tensor[:3] for tensor in tensors], tree)
    index = torch.tensor([4, 0])
    require_equal(rows(tree, index), [tensor[index] for tensor in tensors], tree)
    parts = chunk(tree, 3)
    assert len(parts) == 3
    for place, part in enumerate(parts):
        require_equal(part, [tensor.chunk(3)[place] for tensor in tensors], tree)
    require_equal(pad(tree, 7), [torch.cat([tensor, tensor[:2]]) for tensor in tensors], tree)
    require_equal(pad(rows(tree, slice(0)), 2), [torch.zeros(2, 2) for _ in tensors], tree)
    require_equal(to(tree, torch.device("cpu")), tensors, tree)


def test_what_needs_no_padding_is_not_copied():
    assert pad(TENSOR, 5) is TENSOR


@pytest.mark.parametrize(
    ("item", "targets", "expected"),
    [
        ((1, 2), 1, (1, 2)),
        ([1, 2], 0, (2, 1)),
        ((1, 2, 3), 0, ((2, 3), 1)),
        ((1, 2, 3), -2, ((1, 3), 2)),
        ({"a": 1, "b": 2, "c": 3}, "b", ({"a": 1, "c": 3}, 2)),
        ((1, 2), None, ((1, 2), None)),
    ],
)
def test_target_is_the_part_that_is_named(item, targets, expected):
    assert divide(item, targets, "the sample") == expected
