"""Sharded checkpoints: what is kept, what they contain, and when they are written."""

import os
import time
from pathlib import Path

import pytest
import torch
from sharded import bias_in, names, resume, save_epochs, step, tiny

from ddp_lab.resilience.checkpoint_folder import best_in, progress_in, result_in, steps_in
from ddp_lab.resilience.sharded_files import STATE, damage_of_shards
from ddp_lab.resilience.sharded_read import ShardedCheckpoint
from ddp_lab.run.train import SHARDED_FROM, is_sharded_format
from ddp_lab.training.ema import EMA
from ddp_lab.training.progress import Progress
from ddp_lab.world.runtime import Runtime


def test_two_newest_and_the_best_are_kept(tmp_path):
    save_epochs(tiny(tmp_path), [3.0, 1.0, 2.0, 4.0, float("nan")])
    assert names(tmp_path) == [f"{name}.sharded" for name in ("best_00000002", "step_00000004", "step_00000005")]
    (best,) = best_in(tmp_path)
    assert damage_of_shards(best, Runtime("cpu")) is None
    assert bias_in(best) == 2
    assert result_in(tmp_path, "val_loss") == (best, progress_in(best))
    assert result_in(tmp_path, "val_accuracy") is result_in(tmp_path, None) is None, "it was not chosen by them"
    checkpoints = tiny(tmp_path)
    assert resume(checkpoints, str(best)).epoch == 3
    assert checkpoints.strategy.module.bias.item() == 2
    assert names(tmp_path) == ["best_00000002.sharded"], "checkpoints of later steps are abandoned"


def test_best_shares_its_files_or_is_a_copy(tmp_path, monkeypatch):
    save_epochs(tiny(tmp_path), [3.0])
    assert (tmp_path / "best_00000001.sharded" / STATE).samefile(tmp_path / "step_00000001.sharded" / STATE)

    def refuse(source: Path, path: Path):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    checkpoints = tiny(tmp_path)
    save_epochs(checkpoints, [2.0], resume(checkpoints))
    (best,) = best_in(tmp_path)
    assert not (best / STATE).samefile(tmp_path / "step_00000002.sharded" / STATE)
    assert damage_of_shards(best, Runtime("cpu")) is None


def test_best_epoch_alone_is_not_resumed_from(tmp_path):
    checkpoints = tiny(tmp_path)
    save_epochs(checkpoints, [3.0])
    checkpoints.save(Progress(epoch=3, step=2, best={"val_loss": 1.0}, best_epochs={"val_loss": 2}), newest=False)
    checkpoints.wait()
    assert names(tmp_path) == ["best_00000002.sharded", "step_00000001.sharded"]
    assert tiny(tmp_path).find("auto") == str(tmp_path / "step_00000001.sharded")


def test_optimizer_state_is_resumed_exactly(tmp_path):
    """The bias has never had a gradient, so AdamW has no state for it, neither before nor after."""
    first, second = tiny(tmp_path), tiny(tmp_path)
    first.strategy.module.weight.grad = torch.ones(1, 2)
    for _ in range(2):
        first.optimizer.step()
    first.save(Progress(step=2))
    first.wait()
    resume(second)
    weight, bias = second.strategy.module.weight, second.strategy.module.bias
    assert bias not in second.optimizer.state
    state, expected = second.optimizer.state[weight], first.optimizer.state[first.strategy.module.weight]
    assert state.keys() == expected.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(state[key], expected[key]) for key in state)
    assert state["step"] == 2
    for checkpoints in (first, second):
        checkpoints.optimizer.param_groups[0]["lr"] = 0.1
        step(checkpoints)
    assert torch.equal(weight, first.strategy.module.weight)


class Counting(torch.optim.SGD):
    """SGD that counts its steps in a number that is not a tensor."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["count"] = state.get("count", 0) + 1


def test_optimizer_state_that_is_no_tensor_is_saved(tmp_path):
    for _ in range(2):
        checkpoints = tiny(tmp_path)
        checkpoints.optimizer = Counting(checkpoints.strategy.parameters(), lr=0.1, momentum=0.9)
        checkpoints.optimizer.param_groups[0]["initial_lr"] = 0.1
        progress = resume(checkpoints)
        save_epochs(checkpoints, [1.0], progress)
    weight = checkpoints.strategy.module.weight
    assert checkpoints.optimizer.state[weight]["count"] == 2
    whole = ShardedCheckpoint(tmp_path / "step_00000002.sharded").whole()
    assert whole["optimizer"]["state"]["weight"]["count"] == 2


@pytest.mark.parametrize(("saved", "expected"), [(True, 2), (False, 5)])
def test_averages_are_resumed_or_start_from_the_weights(saved, expected, tmp_path):
    first, second = tiny(tmp_path), tiny(tmp_path)
    bias = first.strategy.module.bias.data
    bias.fill_(1)
    first.ema = EMA(first.strategy, 0.75) if saved else None
    bias.fill_(5)
    if saved:
        first.ema.update()
    first.save(Progress(step=1))
    first.wait()
    second.ema = EMA(second.strategy, 0.75)
    resume(second)
    assert (second.strategy.module.bias.item(), second.ema.averages["bias"].item()) == (5, expected)
    assert ShardedCheckpoint(tmp_path / "step_00000001.sharded").has("ema") == saved


def test_both_formats_resume_from_each_other(tmp_path):
    progress = Progress()
    for sharded in (False, True, True, False):
        checkpoints = tiny(tmp_path, sharded=sharded)
        assert resume(checkpoints) == progress
        save_epochs(checkpoints, [5.0 - progress.epoch], progress)
        progress = checkpoints.kept
    assert [path.name for path in steps_in(tmp_path)] == ["step_00000003.sharded", "step_00000004.pt"]
    assert [path.name for path in best_in(tmp_path)] == ["best.pt"]


def test_checkpoint_of_the_same_step_is_replaced(tmp_path):
    checkpoints = tiny(tmp_path, best=None)
    for bias in (1, 2):
        checkpoints.strategy.module.bias.data.fill_(bias)
        checkpoints.save(Progress(step=1))
    checkpoints.wait()
    assert names(tmp_path) == ["step_00000001.sharded"]
    assert bias_in(tmp_path / "step_00000001.sharded") == 2


def test_training_waits_for_the_copy_and_not_for_the_disk(tmp_path):
    checkpoints = tiny(tmp_path, best=None)
    writing = checkpoints.shards.write_share

    def slowly(folder: Path, share):
        time.sleep(0.5)
        return writing(folder, share)

    checkpoints.shards.write_share = slowly
    seconds = []
    for number in (1, 2):
        start = time.perf_counter()
        checkpoints.strategy.module.bias.data.fill_(number)
        checkpoints.save(Progress(step=number))
        seconds.append(time.perf_counter() - start)
        checkpoints.strategy.module.bias.data.fill_(9)  # training continues while the file is being written
    checkpoints.wait()
    assert seconds[0] < 0.4 < seconds[1], "the second save must wait for the first"
    assert [bias_in(path) for path in steps_in(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("choice", "ranks", "size", "expected"),
    [
        ("auto", 2, SHARDED_FROM, True),
        ("auto", 2, SHARDED_FROM - 1, False),
        ("auto", 1, SHARDED_FROM, False),
        ("whole", 2, SHARDED_FROM, False),
        ("sharded", 1, 1, True),
    ],
)
def test_format_depends_on_size_and_ranks(choice, ranks, size, expected):
    assert is_sharded_format(choice, ranks, size) == expected
