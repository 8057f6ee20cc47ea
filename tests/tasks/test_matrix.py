"""Tasks whose losses have weights, or several values per sample, give the weights of `single` under every strategy."""

from typing import NamedTuple

import pytest
import torch
from cases import usual_options
from torch import nn
from worlds import once, run_world

from ddp_lab.models.chain import Chain
from ddp_lab.models.gpt import gpt
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.ddp import DDP
from ddp_lab.strategies.ddp_pipeline import DDPPipeline
from ddp_lab.strategies.dp import DP
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.pipeline import Pipeline
from ddp_lab.strategies.scratch import Scratch
from ddp_lab.strategies.single import Single
from ddp_lab.strategies.split import Split
from ddp_lab.strategies.tp import TP
from ddp_lab.tasks.multi_label import MultiLabel
from ddp_lab.tasks.regression import Regression
from ddp_lab.tasks.segmentation import Segmentation
from ddp_lab.tasks.tokens import IGNORE, Tokens
from ddp_lab.world.runtime import Runtime

BATCHES = (16, 16, 5)  # global batches; the last one is partial, and not divisible by 2
STRATEGIES: dict[str, tuple[type[Strategy], dict]] = {
    "single": (Single, {}),
    "scratch": (Scratch, {}),
    "dp": (DP, {}),
    "ddp": (DDP, {}),
    "fsdp": (FSDP, {}),
    "split": (Split, {"devices": ["cpu", "cpu"], "num_microbatches": 3}),
    "pipeline": (Pipeline, {}),
    "ddp_pipeline": (DDPPipeline, {"pp": 1}),
    "tp": (TP, {}),
    "mesh": (Mesh, {}),
    "mesh pp": (Mesh, {"pp": 2}),
    "mesh tp": (Mesh, {"tp": 2}),
}
TASKS = {"regression": Regression, "multi_label": MultiLabel, "segmentation": Segmentation, "tokens": Tokens}


def model_of(task: str) -> Chain:
    torch.manual_seed(3)
    if task == "tokens":
        return gpt(16, 8, 2, 16, 4)
    if task == "segmentation":
        return Chain((3, 8, 8), one=nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh()), two=nn.Conv2d(8, 4, 3, padding=1))
    return Chain((6,), one=nn.Sequential(nn.Linear(6, 16), nn.Tanh()), two=nn.Linear(16, 4))


def batch_of(task: str, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    if task == "tokens":
        tokens = torch.randint(0, 16, (size, 9), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.3 * torch.arange(size)[:, None] / size] = IGNORE
        return tokens[:, :-1].contiguous(), targets
    if task == "segmentation":
        targets = torch.randint(0, 4, (size, 8, 8), generator=generator)
        targets[torch.rand(targets.shape, generator=generator) < torch.arange(size)[:, None, None] / size] = 255
        return torch.randn(size, 3, 8, 8, generator=generator), targets
    inputs = torch.randn(size, 6, generator=generator)
    numbers = torch.randn(size, 4, generator=generator)
    return inputs, numbers if task == "regression" else (numbers > 0).long()


class Result(NamedTuple):
    weights: dict[str, torch.Tensor]
    sums: list[list[float]]


def train(runtime: Runtime, name: str, task: str, accumulate: int) -> Result:
    make, options = STRATEGIES[name]
    strategy = make(runtime, **usual_options(make) | options)
    model = model_of(task)
    strategy.task, strategy.input_shape, strategy.input_dtype = TASKS[task](), model.input_shape, model.input_dtype
    strategy.partition(model, BATCHES[0] // strategy.dp_size // accumulate)
    strategy.setup(model)
    optimizer = torch.optim.SGD(list(strategy.parameters()), lr=0.5, momentum=0.9)
    strategy.train()
    sums = []
    for step, size in enumerate(BATCHES):
        inputs, targets = batch_of(task, step, size)
        local = -(-size // strategy.dp_size)
        rows = [(strategy.dp_rank + i * strategy.dp_size) % size for i in range(local)]
        own = strategy.forward_backward(inputs[rows], targets[rows], size, accumulate)
        counted = own.clone() if strategy.is_metric_rank else torch.zeros_like(own)
        sums.append(runtime.all_reduce(counted).tolist())
        optimizer.step()
        optimizer.zero_grad()
    return Result(strategy.model_state(), sums)


def train_all(names: list[str]) -> dict:
    with Runtime("cpu", timeout=60) as runtime:
        if runtime.world_size > 1 or any(not STRATEGIES[name][0].one_process for name in names):
            runtime.open_group()
        found = {}
        for name in names:
            for task in TASKS:
                if (name, task) in EXCLUDED:
                    continue
                for accumulate in (1, 2):
                    found[name, task, accumulate] = train(runtime, name, task, accumulate)
        return found


EXCLUDED = {("mesh tp", task) for task in TASKS if task != "tokens"}
ALONE, TWO = (
    ["single", "dp", "split"],
    ["scratch", "ddp", "fsdp", "pipeline", "ddp_pipeline", "tp", "mesh", "mesh pp", "mesh tp"],
)


@once
def alone() -> dict:
    return run_world(1, train_all, ALONE, timeout=120)[0]


@once
def two() -> dict:
    return run_world(2, train_all, TWO, timeout=240)[0]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", ALONE[1:] + TWO)
def test_weights_equal_those_of_single(name, task, accumulate):
    if (name, task) in EXCLUDED:
        pytest.skip("its blocks have no plan")
    expected = alone()["single", task, 1]
    found = (alone() if name in ALONE else two())[name, task, accumulate]
    start = model_of(task).state_dict()
    assert max((expected.weights[key] - start[key]).abs().max() for key in start) > 0.01
    difference = max((found.weights[key] - expected.weights[key]).abs().max().item() for key in start)
    assert difference < 1e-6
    assert torch.tensor(found.sums).allclose(torch.tensor(expected.sums), rtol=1e-6)


def test_batch_without_weight_has_zero_gradients():
    """A batch of which all targets are ignored must not make the weights NaN."""
    with Runtime("cpu") as runtime:
        strategy, model = Single(runtime), model_of("tokens")
        strategy.task = Tokens()
        strategy.setup(model)
        tokens = torch.zeros(6, 8, dtype=torch.int64)
        *_, weight = strategy.forward_backward(tokens, torch.full_like(tokens, IGNORE), 6)
        assert weight == 0
        assert all((parameter.grad == 0).all() for parameter in strategy.parameters())
