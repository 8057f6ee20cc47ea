"""Tasks whose losses have weights, or several values per sample, give the weights of `single` under every strategy."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from training import full_weights
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.models.chain import Chain
from ddp_lab.models.gpt import gpt
from ddp_lab.tasks.tokens import IGNORE

SAMPLES, BATCH = 37, 16  # the last batch is partial, and not divisible by 2
STRATEGIES: dict[str, dict] = {  # the options, by the name of the strategy, and what tells two of the same name apart
    **{"single": {}, "scratch": {}, "dp": {}, "ddp": {}, "fsdp": {}},
    "split": {"devices": ["cpu", "cpu"], "num_microbatches": 3},
    **{"pipeline": {"num_microbatches": 4}, "ddp_pipeline": {"pp": 1, "num_microbatches": 4}, "tp": {}},
    **{"mesh": {}, "mesh pp": {"pp": 2, "num_microbatches": 4}, "mesh tp": {"tp": 2}},
}
TASKS = {
    "regression": tasks.Regression,
    "multi_label": tasks.MultiLabel,
    "segmentation": tasks.Segmentation,
    "tokens": tasks.Tokens,
}


def model_of(task: str) -> Chain:
    torch.manual_seed(3)
    if task == "tokens":
        return gpt(16, 8, 2, 16, 4)
    if task == "segmentation":
        return Chain((3, 8, 8), one=nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh()), two=nn.Conv2d(8, 4, 3, padding=1))
    return Chain((6,), one=nn.Sequential(nn.Linear(6, 16), nn.Tanh()), two=nn.Linear(16, 4))


def data_of(task: str) -> TensorDataset:
    """Return samples, of which the later ones have more targets to ignore."""
    generator = torch.Generator().manual_seed(0)
    if task == "tokens":
        tokens = torch.randint(0, 16, (SAMPLES, 9), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.3 * torch.arange(SAMPLES)[:, None] / SAMPLES] = IGNORE
        return TensorDataset(tokens[:, :-1].contiguous(), targets)
    if task == "segmentation":
        targets = torch.randint(0, 4, (SAMPLES, 8, 8), generator=generator)
        targets[torch.rand(targets.shape, generator=generator) < torch.arange(SAMPLES)[:, None, None] / SAMPLES] = 255
        return TensorDataset(torch.randn(SAMPLES, 3, 8, 8, generator=generator), targets)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    numbers = torch.randn(SAMPLES, 4, generator=generator)
    return TensorDataset(inputs, numbers if task == "regression" else (numbers > 0).long())


class Result(NamedTuple):
    weights: dict[str, torch.Tensor]
    losses: list[float]
    metrics: dict[str, float]


def train(lab: Lab, task: str, accumulate: int) -> Result:
    data, sgd = data_of(task), partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    trainer = lab.trainer(model_of(task), TASKS[task](), sgd, BATCH, accumulate, example=data[0])
    losses = [trainer.step(*batch).item() for batch in trainer.batches(data, 0, shuffle=False)]
    return Result(full_weights(trainer.strategy), losses, trainer.evaluate(data))


def train_all(names: list[str]) -> dict:
    found = {}
    for name in names:
        with Lab(name.split()[0], device="cpu", **STRATEGIES[name]) as lab:
            for task in TASKS:
                for accumulate in () if (name, task) in EXCLUDED else (1, 2):
                    found[name, task, accumulate] = train(lab, task, accumulate)
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
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-5)
