"""A loss with a state resumes with it, and a loss with constants takes those of the config."""

import re
import shutil
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from checkpoints import newest, start, train
from own_losses import Centred

from ddp_lab.checkpoints.find import open_checkpoint
from ddp_lab.checkpoints.state import State
from ddp_lab.config.errors import ConfigError
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


def test_state_of_another_loss_is_refused():
    strategy = MagicMock(task=Task(Centred(classes=11)))
    state = State(strategy, MagicMock(), MagicMock(), {})
    with pytest.raises(ConfigError) as raised:
        state.load_task(lambda tensors: None, {"task.loss.centre": (10,)})
    expected = "the buffer loss.centre of the loss is (10,) in the checkpoint, and (11,)"
    assert expected in str(raised.value)
