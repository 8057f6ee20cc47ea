"""The traffic of nn.DataParallel that docs/strategies.md promises, counted on GPUs.

python -m pytest -m gpu tests/test_gpu_dp.py
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import comm

from ddp_lab import tasks
from ddp_lab.strategies.dp import DP
from ddp_lab.world.runtime import Runtime

WIDTH = 64
CLASSES = 10
SIZE = WIDTH * CLASSES + CLASSES  # elements of the parameters
SAMPLES = 12


@pytest.mark.gpu(2)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_dp_copies_the_model_to_the_other_gpus_and_sums_their_gradients(accumulate, monkeypatch):
    """2 (W-1) P in each forward and backward pass: W-1 copies, and as many gradients.

    torch's two functions are counted, since they send by NCCL or by copies, as torch was built.
    """
    sent: Counter[str] = Counter()
    broadcast = comm.broadcast_coalesced
    reduce_add = comm.reduce_add_coalesced

    def count_broadcast(tensors: Any, devices: Any, *more: Any) -> Any:
        sent["weights"] += (len(devices) - 1) * sum(each.numel() for each in tensors)
        return broadcast(tensors, devices, *more)

    def count_reduce_add(inputs: Any, destination: Any = None, *more: Any) -> Any:
        devices = [tensors[0].device.index for tensors in inputs]
        others = [device for device in devices if device != destination]
        sent["gradients"] += len(others) * sum(each.numel() for each in inputs[0])
        return reduce_add(inputs, destination, *more)

    monkeypatch.setattr(comm, "broadcast_coalesced", count_broadcast)
    monkeypatch.setattr(comm, "reduce_add_coalesced", count_reduce_add)
    with Runtime("cuda") as runtime:
        strategy = DP(runtime, ["cuda:0", "cuda:1"])
        strategy.task = tasks.Classification()
        model = nn.Linear(WIDTH, CLASSES)
        strategy.partition(model, SAMPLES // 2)
        strategy.setup(model)
        strategy.train()
        inputs = torch.rand(SAMPLES, WIDTH, device="cuda:0")
        targets = torch.zeros(SAMPLES, dtype=torch.int64, device="cuda:0")
        strategy.forward_backward(inputs, targets, SAMPLES, accumulate)
    assert sent == {"weights": accumulate * SIZE, "gradients": accumulate * SIZE}
