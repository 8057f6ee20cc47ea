"""Checkpoints are written while training continues, and the newest and the best are kept."""

import copy
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import train
from launches import only_run
from training import make_model
from worlds import run_world

from ddp_lab.resilience.checkpoint import Checkpoints
from ddp_lab.resilience.checkpoint_files import damage as problem_of
from ddp_lab.resilience.checkpoint_folder import in_order, result_in
from ddp_lab.resilience.decisions import Agreement
from ddp_lab.resilience.guard import Guard, GuardSettings
from ddp_lab.resilience.whole_state import copied, in_model_order
from ddp_lab.strategies.single import Single
from ddp_lab.training.ema import EMA
from ddp_lab.training.progress import Progress
from ddp_lab.training.schedule import cosine, make_scheduler
from ddp_lab.world.runtime import Runtime


def save_on_a_slow_disk(folder) -> tuple[list[float], dict, dict]:
    """Save twice. Return the seconds that each save blocks training, and the first one's weights in memory and in its file."""
    fsync = os.fsync
    os.fsync = lambda file: (time.sleep(1.0), fsync(file))
    runtime = Runtime("cpu")
    strategy = Single(runtime)
    strategy.setup(make_model("lenet", 0))
    optimizer = torch.optim.SGD(strategy.parameters(), lr=0.1, momentum=0.9)
    shapes = {name: tuple(tensor.shape) for name, tensor in strategy.module.state_dict().items()}
    scheduler = make_scheduler(optimizer, cosine, 1, 10, 0)
    checkpoints = Checkpoints(folder, runtime, strategy, optimizer, scheduler, shapes)
    weights = copy.deepcopy(strategy.module.state_dict())
    seconds = []
    for step in (1, 2):
        start = time.perf_counter()
        checkpoints.save(Progress(step=step))
        seconds.append(time.perf_counter() - start)
        with torch.no_grad():
            for parameter in strategy.parameters():
                parameter.add_(1.0)  # training continues while the file is being written
    checkpoints.wait()
    return seconds, weights, torch.load(folder / "step_00000001.pt")["model"]


def test_training_waits_for_the_copy_and_not_for_the_disk(tmp_path):
    ((seconds, weights, written),) = run_world(1, save_on_a_slow_disk, tmp_path)
    assert seconds[0] < 0.5, "writing a file to this disk takes 2 s and more"
    assert seconds[1] > 1.5, "the second save must wait for the first"
    assert all(torch.equal(tensor, written[name]) for name, tensor in weights.items())


def test_copied_state_shares_all_tensors_but_those_that_the_next_step_changes():
    changing, other, rate = torch.zeros(4), torch.zeros(4), torch.zeros(())
    storages = {changing.untyped_storage().data_ptr()}
    state = {
        "model": {"own": changing, "gathered": other},
        "optimizer": {"state": {0: {"momentum": changing[1:]}}, "lr": [rate]},
    }
    found = copied(state, storages)
    for tensor in (changing, other, rate):
        tensor.fill_(1)
    assert found["model"]["own"].tolist() == [0, 0, 0, 0]
    assert found["optimizer"]["state"][0]["momentum"].tolist() == [0, 0, 0], "a view of the same storage"
    assert found["optimizer"]["lr"][0].item() == 0, "tensors in lists, which param_groups are, are always copied"
    assert found["model"]["gathered"] is other, "it is a copy already"
    assert state["model"]["own"] is changing


def test_saved_tensors_have_the_order_of_the_model():
    names = ["embed.w", "block0.w", "block1.w", "head.w"]
    mixed = [names[i] for i in (0, 2, 1, 3)]  # of an interleaved pipeline of two ranks
    state = {key: {name: f"{key} {name}" for name in mixed} for key in ("model", "ema")}
    state["optimizer"] = {"state": {name: name for name in mixed[1:]}, "param_groups": [{"lr": 0.1, "params": mixed[1:]}]}
    found = in_model_order(state, names)
    assert found == state | {"optimizer": state["optimizer"] | {"param_groups": [{"lr": 0.1, "params": names[1:]}]}}
    assert [list(found[key]) for key in ("model", "ema")] == [names, names]
    assert list(found["optimizer"]["state"]) == names[1:]
    assert "ema" not in in_model_order({key: state[key] for key in ("model", "optimizer")}, names)


def test_copied_state_has_containers_of_its_own():
    state = {"param_groups": [{"lr": 0.1, "params": [0, 1]}], "scheduler": {"last_epoch": 3}}
    found = copied(state, set())
    state["param_groups"][0]["lr"] = 0.2
    state["scheduler"]["last_epoch"] = 4
    assert found == {"param_groups": [{"lr": 0.1, "params": [0, 1]}], "scheduler": {"last_epoch": 3}}


def test_only_the_last_two_checkpoints_and_the_best_are_kept(tmp_path):
    train(tmp_path, "many", "epochs=5", "data.dataset.train_size=125", "data.val_fraction=0.2")
    names = sorted(path.name for path in (tmp_path / "many" / "checkpoints").iterdir())
    assert names == [f"{name}.pt{end}" for name in ("best", "step_00000020", "step_00000025") for end in ("", ".sha256")]
    assert only_run(tmp_path).name == "many"


def test_checkpoints_are_saved_as_often_and_kept_as_many_as_asked(tmp_path):
    """The last epoch is always saved."""
    train(tmp_path, "run", "epochs=5", "checkpoint.every_epochs=2", "checkpoint.keep=3")
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*.pt"))
    assert names == ["step_00000010.pt", "step_00000020.pt", "step_00000025.pt"]


def test_checkpoints_are_ordered_by_step():
    """This holds even if a step has more digits than the zero-padded file names."""
    paths = [Path(f"step_{step:08d}.pt") for step in (5, 99_999_999, 100_000_000)]
    assert in_order(reversed(paths)) == paths


def tiny_checkpoints(folder: Path, best: str | None = "val_loss") -> Checkpoints:
    runtime = Runtime("cpu")
    strategy = Single(runtime)
    strategy.setup(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(strategy.parameters(), lr=0.1)
    shapes = {name: tuple(tensor.shape) for name, tensor in strategy.module.state_dict().items()}
    return Checkpoints(folder, runtime, strategy, optimizer, make_scheduler(optimizer, cosine, 10, 1, 0), shapes, best=best)


def save_epochs(checkpoints: Checkpoints, losses: list[float], accuracies: list[float], start: Progress | None = None) -> None:
    """Save a checkpoint after each epoch. The bias is the number of the epoch, and an epoch has one step."""
    progress = start or Progress()
    for loss, accuracy in zip(losses, accuracies, strict=True):
        checkpoints.strategy.module.bias.data.fill_(progress.epoch)
        progress = replace(progress, step=progress.step + 1, samples=1)
        progress = progress.next_epoch({"val_loss": loss, "val_accuracy": accuracy})
        checkpoints.save(progress)
    checkpoints.wait()


def epoch_of_best(folder: Path) -> float | None:
    """Return the epoch whose weights `best.pt` holds, after a check of its hash; None if there is no such file."""
    if not (folder / "best.pt").exists():
        return None
    assert problem_of(folder / "best.pt") is None
    return torch.load(folder / "best.pt", weights_only=True)["model"]["bias"].item()


@pytest.mark.parametrize(("best", "expected"), [("val_loss", 2), ("val_accuracy", 3), (None, None)])
def test_best_checkpoint_is_kept_besides_the_newest(best, expected, tmp_path):
    save_epochs(tiny_checkpoints(tmp_path, best), [3.0, 1.0, 2.0, 4.0, float("nan")], [0.1, 0.2, 0.5, 0.4, 0.9])
    assert epoch_of_best(tmp_path) == expected
    names = [path.name for path in sorted(tmp_path.glob("*.pt"))]
    assert names == ["best.pt"] * (best is not None) + ["step_00000004.pt", "step_00000005.pt"]
    assert not list(tmp_path.glob("*.tmp"))


def test_best_checkpoint_shares_its_file_or_is_a_copy(tmp_path, monkeypatch):
    checkpoints = tiny_checkpoints(tmp_path)
    save_epochs(checkpoints, [3.0], [0.1])
    assert (tmp_path / "best.pt").samefile(tmp_path / "step_00000001.pt")

    def refuse(source: Path, path: Path):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    save_epochs(checkpoints, [2.0], [0.1], Progress(epoch=2, step=1, best={"val_loss": 3.0}, best_epochs={"val_loss": 1}))
    assert not (tmp_path / "best.pt").samefile(tmp_path / "step_00000002.pt")
    assert epoch_of_best(tmp_path) == 2


def test_resume_auto_ignores_the_best_checkpoint_and_a_path_accepts_it(tmp_path):
    checkpoints = tiny_checkpoints(tmp_path)
    save_epochs(checkpoints, [1.0, 2.0, 3.0], [0.1] * 3)
    assert checkpoints.find("auto") == str(tmp_path / "step_00000003.pt")
    assert checkpoints.resume(str(tmp_path / "best.pt"), lambda progress: progress.step).epoch == 2
    assert checkpoints.strategy.module.bias.item() == 1
    assert [path.name for path in tmp_path.glob("*.pt")] == ["best.pt"], "files of later steps are abandoned"
    assert checkpoints.find("auto") is None


@pytest.mark.parametrize(
    ("losses", "lost", "resumed", "expected", "afterwards"),
    [
        ([2.0, 1.0, 3.0], False, 3, 2, 2),  # the best is from before
        ([3.0, 2.0, 1.0], True, 3, 3, 3),  # killed between the file and its second name
        ([3.0, 2.0, 1.0], False, 2, 2, 2),  # the newest is given up
        ([1.0, 3.0, 0.5], False, 2, None, 3),  # the best is given up, and as the one before it is gone, the next one is best
    ],
)
def test_best_checkpoint_is_corrected_on_resume(losses, lost, resumed, expected, afterwards, tmp_path):
    checkpoints = tiny_checkpoints(tmp_path)
    save_epochs(checkpoints, losses, [0.1] * 3)
    if lost:
        (tmp_path / "best.pt").unlink()
    again = tiny_checkpoints(tmp_path)
    progress = again.resume(str(tmp_path / f"step_0000000{resumed}.pt"), lambda progress: progress.step)
    assert epoch_of_best(tmp_path) == expected
    save_epochs(again, [9.0], [0.1], progress)
    assert epoch_of_best(tmp_path) == afterwards, "the best val_loss must survive a resume, if its weights do"


def test_best_by_another_metric_begins_anew(tmp_path):
    """The most accurate epoch so far was not kept, so the next one is the best, and it is the epoch that its file has."""
    save_epochs(tiny_checkpoints(tmp_path), [1.0, 2.0, 3.0], [0.1, 0.9, 0.5])
    path, best = result_in(tmp_path, "val_loss")
    assert (path.name, best.epoch - 1) == ("best.pt", 1)
    again = tiny_checkpoints(tmp_path, "val_accuracy")
    progress = again.resume("auto", lambda progress: progress.step)
    assert (progress.best, progress.best_epochs["val_loss"]) == ({"val_loss": 1.0, "val_accuracy": 0.1}, 1)
    save_epochs(again, [4.0, 5.0], [0.4, 0.3], progress)
    path, best = result_in(tmp_path, "val_accuracy")
    assert (best.epoch - 1, epoch_of_best(tmp_path)) == (4, 4)
    assert result_in(tmp_path, "val_loss") is result_in(tmp_path, None) is None


def test_best_checkpoint_that_cannot_be_corrected_is_logged(tmp_path, caplog):
    save_epochs(tiny_checkpoints(tmp_path), [3.0, 2.0], [0.1] * 2)
    newest = tmp_path / "step_00000002.pt"
    newest.with_name("step_00000002.pt.sha256").unlink()
    assert tiny_checkpoints(tmp_path).resume(str(newest), lambda progress: progress.step).epoch == 3
    assert "best.pt could not be written" in caplog.text


@pytest.mark.parametrize(("loss", "saved"), [(1.0, ["best.pt"]), (3.0, [])])
def test_best_epoch_is_saved_even_if_no_checkpoint_is_due(loss, saved, tmp_path):
    checkpoints = tiny_checkpoints(tmp_path)
    settings = GuardSettings(10, None, "stop", "stop", None)
    decisions = SimpleNamespace(now=lambda *args: Agreement(None, False, False, False))
    watchdog = SimpleNamespace(at=lambda doing: None)
    start = Progress(epoch=2, step=1, best={"val_loss": 2.0}, best_epochs={"val_loss": 1})
    guard = Guard(settings, checkpoints.strategy, checkpoints, decisions, watchdog, start)
    guard.end_epoch(start.next_epoch({"val_loss": loss}), last=False)
    checkpoints.wait()
    assert [path.name for path in tmp_path.glob("*.pt")] == saved
    assert guard.progress is start, "a run cannot resume from the best with resume=auto"


def test_checkpoint_during_an_evaluation_has_weights_and_averages_in_their_places(tmp_path):
    """A preemption saves a checkpoint while the model has the averages as its weights."""
    checkpoints = tiny_checkpoints(tmp_path)
    bias = checkpoints.strategy.module.bias.data
    bias.fill_(1)
    checkpoints.ema = EMA(checkpoints.strategy, 0.75)
    bias.fill_(5)
    checkpoints.ema.update()
    with checkpoints.ema.in_use():
        assert bias.item() == 2
        checkpoints.save(Progress(step=1))
    checkpoints.wait()
    state = torch.load(tmp_path / "step_00000001.pt", weights_only=True)
    assert (state["model"]["bias"].item(), state["ema"]["bias"].item(), bias.item()) == (5, 2, 5)


@pytest.mark.parametrize(("saved", "expected"), [(True, 2), (False, 5)])
def test_averages_are_resumed_or_start_from_the_weights(saved, expected, tmp_path, caplog):
    first, second = tiny_checkpoints(tmp_path), tiny_checkpoints(tmp_path)
    bias = first.strategy.module.bias.data
    bias.fill_(1)
    first.ema = EMA(first.strategy, 0.75) if saved else None
    bias.fill_(5)
    if saved:
        first.ema.update()
    first.save(Progress(step=1))
    first.wait()
    second.ema = EMA(second.strategy, 0.75)
    with caplog.at_level("INFO", "ddp_lab"):
        second.resume("auto", lambda progress: progress.step)
    assert (second.strategy.module.bias.item(), second.ema.averages["bias"].item()) == (5, expected)
    assert ("they start from its weights" in caplog.text) != saved
