"""The traffic of split that docs/strategies.md promises, counted without GPUs.

The second device is torch's meta device, whose tensors have no data. So the copies back to the CPU,
which torch refuses, are made up.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_lab import tasks
from ddp_lab.models.chain import Chain
from ddp_lab.strategies.split import Split
from ddp_lab.world.runtime import Runtime

WIDTH = 6  # of the activations at the cut
SAMPLES = 8
CPU = torch.device("cpu")
META = torch.device("meta")


class CopiedElements(TorchDispatchMode):
    """Counts the elements that are copied between devices, by source and destination."""

    def __init__(self):
        super().__init__()
        self.elements: Counter[tuple[torch.device, torch.device]] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        device = (kwargs or {}).get("device")
        if func is not torch.ops.aten._to_copy.default or device in (None, args[0].device):
            return func(*args, **kwargs or {})
        self.elements[args[0].device, device] += args[0].numel()
        return torch.zeros_like(args[0], device=device)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_split_copies_the_activations_at_the_cut_forward_and_their_gradients_back(
    num_microbatches,
):
    with Runtime("cpu") as runtime:
        strategy = Split(runtime, None, num_microbatches)
        strategy.task = tasks.Regression()
        model = Chain((4,), first=nn.Linear(4, WIDTH), last=nn.Linear(WIDTH, 2))
        strategy.devices = [CPU, META]
        strategy.partition(model, SAMPLES)
        strategy.setup(model)
        assert [part.weight.device for part in model] == [CPU, META]
        targets = torch.rand(SAMPLES, 2)
        with CopiedElements() as copied:
            sums = strategy.forward_backward(torch.rand(SAMPLES, 4), targets, SAMPLES)
    scale = 1  # of all gradients, by the weight of the batch
    assert copied.elements == {
        (CPU, META): SAMPLES * WIDTH + targets.numel() + scale,
        (META, CPU): SAMPLES * WIDTH + sums.numel(),
    }
