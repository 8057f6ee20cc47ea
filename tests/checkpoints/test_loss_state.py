"""A loss with a state resumes with it, and a loss with constants takes those of the config."""

import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from checkpoints import newest, start, train
from launches import read_metrics
from own_losses import Centred
from torch import nn

from ddp_lab.checkpoints.find import open_checkpoint
from ddp_lab.checkpoints.loss_state import load_loss
from ddp_lab.checkpoints.state import State
from ddp_lab.launchers.read_config import read_config
from ddp_lab.run.build_trained import evaluate_run
from ddp_lab.tasks.base import Task
from ddp_lab.world.runtime import Runtime

CENTRED = ["loss=own", "loss._target_=own_losses.Centred"]
FOCAL = ["loss=own", "loss._target_=own_losses.Focal", "+loss.gamma=1.0"]


def last_of(run_dir: Path) -> Path:
    folder = run_dir / "checkpoints"
    return max(path for path in folder.iterdir() if re.fullmatch(r"step_\d+\.\w+", path.name))


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_run_resumes_with_the_state_of_its_loss(form, tmp_path):
    overrides = (*CENTRED, "epochs=3", f"checkpoint.format={form}")
    start(tmp_path / "cut", 1, overrides)
    last = last_of(tmp_path / "cut")
    straight = open_checkpoint(last).content()
    assert straight["task"]["loss.centre"].abs().max() > 0.01
    if last.is_dir():
        shutil.rmtree(last)
    else:
        last.unlink()
    start(tmp_path / "cut", 1, overrides)
    resumed = open_checkpoint(last_of(tmp_path / "cut")).content()
    assert resumed["progress"]["step"] == straight["progress"]["step"]
    for part in ("model", "task"):
        for name, tensor in straight[part].items():
            assert torch.equal(tensor, resumed[part][name]), name


def test_evaluation_has_the_state_of_the_loss(tmp_path):
    run = tmp_path / "run"
    start(run, 1, (*CENTRED, "epochs=2"))
    with Runtime("cpu") as runtime:
        metrics = evaluate_run(read_config(run, [], None), runtime, run, "last")
    assert metrics["test_loss"] == read_metrics(run)[-1]["test_loss"]


def test_constants_of_a_loss_are_in_no_checkpoint(tmp_path):
    train(tmp_path, "focal", *FOCAL, "epochs=1")
    assert "task" not in newest(tmp_path / "focal")


def test_buffer_without_a_value_or_of_another_shape_is_saved_and_loaded():
    class Growing(Centred):
        def __init__(self):
            super().__init__()
            self.register_buffer("queue", torch.zeros(0, dtype=torch.int64))
            self.register_buffer("late", None)

    before = state_of(Growing())
    task = before.strategy.task
    task.loss.queue = torch.arange(3)
    task.loss.late = torch.ones(2)
    saved = before.loss_state()
    assert sorted(saved) == ["task.loss.late", "task.loss.queue"]
    after = state_of(Growing())
    loaded = after.strategy.task.loss
    load(after, saved, lambda tensors: [tensors[key].copy_(saved[key]) for key in tensors])
    assert torch.equal(loaded.queue, torch.arange(3))
    assert torch.equal(loaded.late, torch.ones(2))
    assert sorted(after.loss_state()) == sorted(saved)


def test_state_of_another_loss_is_left_out():
    state = state_of(nn.CrossEntropyLoss())
    load(state, {"task.loss.centre": torch.zeros(1)}, lambda tensors: pytest.fail("it is read"))
    assert state.loss_state() == {}


def test_ranks_without_the_loss_save_no_state_of_it():
    """Each stage of a pipeline loads it, but only the last one changes it."""
    state = state_of(Centred(), is_metric_rank=False)
    state.strategy.task.loss.centre += 1
    assert state.loss_state() == {}


def load(state: State, tensors: dict[str, torch.Tensor], read: Any) -> None:
    load_loss(state.strategy.task, state.strategy.device, read, tensors)


def state_of(loss: nn.Module, is_metric_rank: bool = True) -> State:
    device = torch.device("cpu")
    task = Task(loss)
    strategy = MagicMock(task=task, task_of_steps=task, device=device)
    strategy.is_metric_rank = is_metric_rank
    return State(strategy, MagicMock(), MagicMock(), {})
