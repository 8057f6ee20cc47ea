"""A loss with a state resumes with it, and a loss with constants takes those of the config."""

import re
import shutil
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from checkpoints import newest, start, train
from own_losses import Centred
from torch import nn

from ddp_lab.checkpoints.find import open_checkpoint
from ddp_lab.checkpoints.state import State
from ddp_lab.tasks.base import Task

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
    saved = before.task_state()
    assert sorted(saved) == ["task.loss.late", "task.loss.queue"]
    after = state_of(Growing())
    after.load_task(lambda tensors: [tensors[key].copy_(saved[key]) for key in tensors], saved)
    loaded = after.strategy.task.loss
    assert torch.equal(loaded.queue, torch.arange(3))
    assert torch.equal(loaded.late, torch.ones(2))
    assert sorted(after.task_state()) == sorted(saved)


def test_state_of_another_loss_is_left_out():
    state = state_of(nn.CrossEntropyLoss())
    state.load_task(lambda tensors: pytest.fail("it is read"), {"task.loss.centre": torch.zeros(1)})
    assert state.task_state() == {}


def test_ranks_without_the_loss_save_no_state_of_it():
    """Each stage of a pipeline loads it, but only the last one changes it."""
    state = state_of(Centred(), is_metric_rank=False)
    state.strategy.task.loss.centre += 1
    assert state.task_state() == {}


def state_of(loss: nn.Module, is_metric_rank: bool = True) -> State:
    device = torch.device("cpu")
    strategy = MagicMock(task=Task(loss), device=device, is_metric_rank=is_metric_rank)
    return State(strategy, MagicMock(), MagicMock(), {})
