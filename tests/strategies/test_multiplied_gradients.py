"""Gradients are multiplied by a number in one call for all of one type."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_lab.strategies.gradients import multiply


class Calls(TorchDispatchMode):
    """Notes the names of the operations that are called, and the dtypes of their last argument."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mul" in func.__name__:
            self.calls.append((func.__name__, args[-1].dtype))
        return func(*args, **(kwargs or {}))


def test_gradients_of_one_type_are_multiplied_together_by_a_number_of_that_type():
    kinds = [torch.float32, torch.float64, torch.float32, torch.complex64]
    gradients = [torch.tensor([1.0, -2.0, 8.0], dtype=kind) for kind in kinds]
    with Calls() as called:
        multiply(gradients, torch.tensor(0.25, dtype=torch.float64))
    for gradient, kind in zip(gradients, kinds, strict=True):
        assert gradient.dtype == kind
        assert torch.equal(gradient, torch.tensor([0.25, -0.5, 2.0], dtype=kind))
    assert called.calls == [
        ("_foreach_mul_.Tensor", kind) for kind in (torch.float32, torch.float64, torch.complex64)
    ]
