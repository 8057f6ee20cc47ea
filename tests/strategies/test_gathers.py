"""What fsdp and mesh gather: an evaluation must not change what the next training step gathers."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training import make_model
from worlds import run_world

from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.strategies.fully_shard import copy_views
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.world.runtime import Runtime

OPTIONS = {"schedule": "1f1b", "num_microbatches": 4, "num_stages": None, "cut": None, "batch_norm": "local"}
AXES = {"dp": None, "shard": None, "tp": 1, "pp": 1, "sequence_parallel": False}


class Gathers(TorchDispatchMode):
    """Counts the all_gathers that begin in it, like CommDebugMode, whose hooks fail with accumulation on torch 2.11."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "allgather" in str(func)
        return func(*args, **(kwargs or {}))


def gathers(sharded: str) -> list[int]:
    """Return the numbers of all_gathers in three steps; before the last one is an evaluation of two batches."""
    counts = []
    with Runtime("cpu", timeout=30) as runtime:
        runtime.open_group()
        strategy = FSDP(runtime, True, "local", None) if sharded == "fsdp" else Mesh(runtime, **AXES, **OPTIONS)
        model = make_model("vit", seed=0)
        strategy.partition(model, 4)
        strategy.setup(model)
        images, targets = torch.ones(4, *model.input_shape), torch.arange(4)
        for evaluations in (0, 0, 2):
            for _ in range(evaluations):
                strategy.predict(images)
            with Gathers() as communication:
                strategy.forward_backward(images, targets, count=8, accumulate=2)
            counts.append(communication.count)
        del strategy
    return counts


@pytest.mark.parametrize("sharded", ["fsdp", "mesh"])
def test_evaluation_does_not_change_what_a_step_gathers(sharded):
    first, before, after = run_world(2, gathers, sharded)[0]
    assert 0 < first == before == after


def test_only_views_in_the_output_of_a_part_are_copied():
    made = torch.arange(6.0).reshape(2, 3).clone()
    outputs = copy_views(torch.nn.Identity(), (), {"pair": (made, made[1]), "name": "a"})
    same, copied = outputs["pair"]
    assert same is made
    assert copied._base is None
    assert copied.tolist() == [3, 4, 5]
    assert outputs["name"] == "a"
