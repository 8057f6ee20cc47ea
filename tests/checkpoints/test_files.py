"""Checkpoints of both formats, without a run.

What is kept, what they hold, and what is left when something goes wrong.
"""

import json
import os
import pickle
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from checkpoints import bias_in, names, resume, save_epochs, step, tiny
from safetensors.torch import save_file
from torch import nn

from ddp_lab.checkpoints.checkpoints import SHARDED_FROM, Checkpoints, is_sharded_format
from ddp_lab.checkpoints.files import STATE, best_in, sha256, steps_in, sums_of
from ddp_lab.checkpoints.find import open_checkpoint, result_in
from ddp_lab.config.errors import ConfigError
from ddp_lab.training.ema import EMA
from ddp_lab.training.progress import Progress

ENDS = {"file": ".pt", "sharded": ".sharded"}
SHARD = "shard-00001-model-00001-of-00001.safetensors"
both_formats = pytest.mark.parametrize("form", ENDS)


def path_of(folder: Path, step: int, form: str) -> Path:
    return folder / f"step_{step:08d}{ENDS[form]}"


@both_formats
@pytest.mark.parametrize(("best", "expected"), [("val_loss", 2), ("val_accuracy", 3), (None, None)])
def test_newest_two_and_the_best_checkpoint_are_kept(best, expected, form, tmp_path):
    losses = [3.0, 1.0, 2.0, 4.0, float("nan")]
    accuracies = [0.3, 0.2, 0.5, 0.4, 0.45]
    progress = save_epochs(tiny(tmp_path, best, form == "sharded"), losses, None, accuracies)
    assert progress.best == {"val_loss": 1.0, "val_accuracy": 0.5}
    assert progress.best_epochs == {"val_loss": 2, "val_accuracy": 3}
    assert (progress.stalled("val_loss"), progress.stalled("val_accuracy")) == (3, 2)
    kept = [path_of(tmp_path, step, form).name for step in (expected, 4, 5) if step]
    assert names(tmp_path) == [f"best{ENDS[form]}"] * (best is not None) + kept
    if best:
        path, progress = result_in(tmp_path, best)
        assert (bias_in(path), progress.epoch - 1) == (expected, expected)
    other = {"val_loss": "val_accuracy", "val_accuracy": "val_loss"}.get(best, "val_loss")
    assert result_in(tmp_path, other) is result_in(tmp_path, None) is None, (
        "it was not chosen by them"
    )


@both_formats
@pytest.mark.parametrize(
    ("losses", "lost", "resumed", "expected", "afterwards"),
    [
        ([2.0, 1.0, 3.0], False, 3, 2, 2),  # the best is from before
        ([3.0, 2.0, 1.0], True, 3, 3, 3),  # killed between the checkpoint and its link
        ([3.0, 2.0, 1.0], False, 2, 2, 2),  # the newest is given up
        # the best is given up, and as the one before it is gone, the next one is best
        ([1.0, 3.0, 0.5], False, 2, None, 3),
    ],
)
def test_best_checkpoint_is_corrected_on_resume(
    losses, lost, resumed, expected, afterwards, form, tmp_path
):
    save_epochs(tiny(tmp_path, sharded=form == "sharded"), losses)
    if lost:
        best_in(tmp_path).unlink()
    again = tiny(tmp_path, sharded=form == "sharded")
    progress = resume(again, str(path_of(tmp_path, resumed, form)))
    assert (bias_in(best_in(tmp_path)) if best_in(tmp_path) else None) == expected
    assert steps_in(tmp_path)[-1] == path_of(tmp_path, resumed, form), (
        "checkpoints of later steps are abandoned"
    )
    save_epochs(again, [9.0], progress)
    assert bias_in(best_in(tmp_path)) == afterwards, (
        "the best val_loss must survive a resume, if its weights do"
    )


def test_best_by_another_metric_begins_anew(tmp_path):
    """The most accurate epoch so far was not kept, so the next one is the best."""
    save_epochs(tiny(tmp_path), [1.0, 2.0, 3.0], None, [0.1, 0.9, 0.5])
    again = tiny(tmp_path, "val_accuracy")
    progress = resume(again)
    assert progress.best == {"val_loss": 1.0}
    save_epochs(again, [4.0, 5.0], progress, [0.4, 0.3])
    assert bias_in(result_in(tmp_path, "val_accuracy")[0]) == 4


@both_formats
def test_best_checkpoint_may_be_a_copy(form, tmp_path):
    """Programs that copy a directory may write copies in place of links."""
    save_epochs(tiny(tmp_path / "old", sharded=form == "sharded"), [1.0])
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    best = best_in(tmp_path / "new")
    assert not best.is_symlink()
    assert bias_in(best) == 1
    again = tiny(tmp_path / "new", sharded=form == "sharded")
    progress = resume(again, str(best))
    assert bias_in(best) == 1, "a link to itself would destroy it"
    save_epochs(again, [0.5], progress)
    assert bias_in(best) == 2


@both_formats
def test_checkpoint_of_the_same_step_is_replaced(form, tmp_path):
    """A process that has the old file open still reads all of it: it is not written in place."""
    checkpoints = tiny(tmp_path, None, form == "sharded")
    path = path_of(tmp_path, 1, form)
    checkpoints.save(Progress(step=1))
    checkpoints.wait()
    file = path / SHARD if form == "sharded" else path
    before = file.read_bytes()
    with file.open("rb") as reader:
        checkpoints.state.strategy.module.bias.data.fill_(2)
        checkpoints.save(Progress(step=1))
        checkpoints.wait()
        assert reader.read() == before
    assert names(tmp_path) == [path.name]
    assert bias_in(path) == 2


@both_formats
def test_training_waits_for_the_copy_and_not_for_the_disk(form, tmp_path):
    checkpoints = tiny(tmp_path, None, form == "sharded")
    save_epochs(checkpoints, [1.0])  # the first save loads modules
    checkpoints.before_write = lambda path: time.sleep(0.5)
    module = checkpoints.state.strategy.module
    seconds = []
    for number in (2, 3):
        step(checkpoints)
        counted = checkpoints.state.optimizer.state[module.weight]["step"].item()
        start = time.perf_counter()
        module.bias.data.fill_(number)
        checkpoints.save(Progress(step=number))
        seconds.append(time.perf_counter() - start)
        module.bias.data.fill_(9)  # training continues while the file is being written
        step(checkpoints)
    checkpoints.wait()
    assert seconds[0] < 0.4 < seconds[1], "the second save must wait for the first"
    assert [bias_in(path_of(tmp_path, step, form)) for step in (2, 3)] == [2, 3]
    saved = open_checkpoint(path_of(tmp_path, 3, form))
    state = saved.content()["optimizer"]
    assert state["state"]["weight"]["step"].item() == counted


class Counting(torch.optim.SGD):
    """SGD that counts its steps in a number that is not a tensor."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["count"] = state.get("count", 0) + 1


@both_formats
@pytest.mark.parametrize("make", [torch.optim.AdamW, Counting])
def test_optimizer_state_is_resumed_exactly(make, form, tmp_path):
    """The bias has never had a gradient, so there is no state for it, neither before nor after."""
    first, second = (tiny(tmp_path, None, form == "sharded", make) for _ in range(2))
    parts = [(each.state.strategy.module, each.state.optimizer) for each in (first, second)]
    for _ in range(2):
        parts[0][0].weight.grad = torch.ones(1, 2)
        parts[0][1].step()
    first.save(Progress(step=2))
    first.wait()
    resume(second)
    expected, loaded = (optimizer.state[module.weight] for module, optimizer in parts)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(*map(torch.as_tensor, (loaded[key], expected[key]))) for key in expected)
    for module, optimizer in parts:
        assert module.bias not in optimizer.state
        module.weight.grad = torch.ones(1, 2)
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
    assert torch.equal(parts[0][0].weight, parts[1][0].weight)


@both_formats
def test_momentum_of_another_memory_format_gets_the_strides_of_the_weights(form, tmp_path):
    """channels_last is an option of a launch, and fused kernels require equal strides."""
    models = nn.Conv2d(2, 3, 3), nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    first, second = (
        tiny(tmp_path, None, form == "sharded", torch.optim.SGD, model) for model in models
    )
    models[0](torch.ones(1, 2, 4, 4)).sum().backward()
    first.state.optimizer.step()
    first.save(Progress(step=1))
    first.wait()
    resume(second)
    loaded = second.state.optimizer.state[models[1].weight]
    expected = first.state.optimizer.state[models[0].weight]
    assert (
        loaded["momentum_buffer"].stride() == models[1].weight.stride() != models[0].weight.stride()
    )
    assert torch.equal(loaded["momentum_buffer"], expected["momentum_buffer"])


@both_formats
def test_checkpoint_during_an_evaluation_has_weights_and_averages_in_their_places(form, tmp_path):
    """A preemption saves a checkpoint while the model has the averages as its weights."""
    first, second = (tiny(tmp_path, None, form == "sharded") for _ in range(2))
    bias = first.state.strategy.module.bias.data
    bias.fill_(1)
    first.state.ema = EMA(first.state.strategy, 0.75, warmup=False)
    bias.fill_(5)
    first.state.ema.update()
    with first.state.ema.in_use():
        assert bias.item() == 2
        first.save(Progress(step=1))
    first.wait()
    second.state.ema = EMA(second.state.strategy, 0.75, warmup=False)
    resume(second)
    assert (
        bias.item(),
        second.state.strategy.module.bias.item(),
        second.state.ema.averages["bias"].item(),
    ) == (5, 5, 2)
    assert bias_in(path_of(tmp_path, 1, form)) == 2, "the averages are the weights to evaluate"


@both_formats
def test_averages_start_from_the_weights_of_a_checkpoint_without_them(form, tmp_path, caplog):
    """Their decay warms up from there on, also after another resume."""
    save_epochs(tiny(tmp_path, None, form == "sharded"), [1.0])
    again = tiny(tmp_path, None, form == "sharded")
    again.state.ema = EMA(again.state.strategy, 0.75, warmup=True)
    with caplog.at_level("INFO", "ddp_lab"):
        progress = resume(again)
    assert again.state.ema.averages["bias"].item() == 1
    assert "they start from its weights" in caplog.text
    assert progress.step > 0
    assert updates_of(again) == {0}
    progress.step += 2
    again.save(progress)
    again.wait()
    third = tiny(tmp_path, None, form == "sharded")
    third.state.ema = EMA(third.state.strategy, 0.75, warmup=True)
    resume(third)
    assert updates_of(third) == {2}


def updates_of(checkpoints: Checkpoints) -> set[float]:
    """Return the number of updates of the averages that each device counts."""
    return {count.item() for count in checkpoints.state.ema.counted.updates.values()}


@both_formats
def test_hashes_pass_sha256sum(form, tmp_path):
    save_epochs(tiny(tmp_path, None, form == "sharded"), [1.0])
    sums = sums_of(path_of(tmp_path, 1, form))
    checked = subprocess.run(
        ["sha256sum", "-c", sums.name], cwd=sums.parent, capture_output=True, text=True
    )
    assert (
        checked.stdout
        == {"file": "step_00000001.pt: OK\n", "sharded": f"{SHARD}: OK\n{STATE}: OK\n"}[form]
    )


def warnings_in(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def damage(kind: str, path: Path) -> None:
    file = path if path.is_file() else path / (kind if (path / kind).exists() else SHARD)
    content = file.read_bytes()
    if kind == "missing":
        file.unlink()
    elif kind == "truncated":
        file.write_bytes(content[:-1])
    elif kind == "unhashed":
        sums_of(path).unlink()
    elif kind == "added":
        (path / "shard-00002-model-00001-of-00001.safetensors").write_bytes(content)
    else:
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


KINDS = {
    "file": ["truncated", "flipped", "unhashed"],
    "sharded": ["missing", "flipped", "added", STATE],
}


@pytest.mark.parametrize(
    ("form", "kind"), [(form, kind) for form, kinds in KINDS.items() for kind in kinds]
)
def test_damaged_checkpoint_is_named_and_the_previous_one_resumed(form, kind, tmp_path, caplog):
    save_epochs(tiny(tmp_path, None, form == "sharded"), [1.0, 1.0])
    before, newest = steps_in(tmp_path)
    damage(kind, newest)
    checkpoints = tiny(tmp_path, None)
    if (form, kind) != ("file", "unhashed"):
        with pytest.raises(ConfigError, match=f"resume={newest}: the checkpoint is damaged: "):
            resume(checkpoints, str(newest))
    assert resume(checkpoints).step == 1
    assert checkpoints.state.strategy.module.bias.item() == 1
    (warning,) = warnings_in(caplog)
    assert warning.startswith(f"{newest} is damaged (")
    assert warning.endswith(f"); using {before}, the newest valid checkpoint")
    damage(kind, before)
    with pytest.raises(
        ConfigError, match=r"resume=auto: none of the run's checkpoints is valid: .*step_00000001"
    ):
        resume(tiny(tmp_path, None))


class Malicious:
    def __init__(self, trace: Path):
        self.trace = str(trace)

    def __reduce__(self):
        return os.mkdir, (self.trace,)


def renamed(path: Path) -> dict:
    """Return the content of a checkpoint whose tensors have other names."""
    good = torch.load(path, weights_only=True)
    return good | {"model": {f"module.{name}": tensor for name, tensor in good["model"].items()}}


GAP = {"DCP_SHARDING_INFO": json.dumps({"model.bias": {"saved_offsets": [5]}})}
# what replaces a file of a checkpoint, of both formats: the file, what writes it, and a part of the
# message
CRAFTED = {
    "pickle": (
        "",
        lambda path, bad: path.write_bytes(pickle.dumps({"progress": bad})),
        "UnpicklingError",
    ),
    "archive": ("", lambda path, bad: torch.save({"progress": bad}, path), "UnpicklingError"),
    "text": ("", lambda path, bad: path.write_text("junk"), "is not a checkpoint of ddp_lab ("),
    "foreign": (
        "",
        lambda path, bad: torch.save({"bias": torch.ones(1)}, path),
        "it lacks model, optimizer, progress, ",
    ),
    "renamed": (
        "",
        lambda path, bad: torch.save(renamed(path), path),
        "weight is missing in the checkpoint, (1, 2) in the ",
    ),
    "pickled shard": (
        SHARD,
        lambda path, bad: path.write_bytes(pickle.dumps(bad)),
        "SafetensorError",
    ),
    "pickled state": (
        STATE,
        lambda path, bad: path.write_bytes(pickle.dumps(bad)),
        "is not a checkpoint of ddp_lab (",
    ),
    "keys": (
        STATE,
        lambda path, bad: path.write_text('{"progress": {}, "optimizer": {}}'),
        "it lacks scheduler, seed",
    ),
    "gap": (
        SHARD,
        lambda path, bad: save_file({"model.bias": torch.zeros(1)}, path, GAP),
        "shards of model.bias are missing",
    ),
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_crafted_checkpoint_is_refused_and_does_not_run_code(kind, tmp_path):
    """The hashes reveal the change.

    Restricted loading protects from somebody who writes other hashes, too.
    """
    name, write, message = CRAFTED[kind]
    save_epochs(tiny(tmp_path, None, bool(name)), [1.0])
    path = path_of(tmp_path, 1, "sharded" if name else "file")
    trace = tmp_path / "executed"
    file = path / name
    write(file, Malicious(trace))
    with pytest.raises(ConfigError, match="is damaged"):
        resume(tiny(tmp_path, None))
    sums = sums_of(path).read_text().splitlines()
    lines = [f"{sha256(file)}  {file.name}" if line.endswith(file.name) else line for line in sums]
    sums_of(path).write_text("\n".join(lines))
    with pytest.raises(ConfigError) as error:
        resume(tiny(tmp_path, None))
    assert message in str(error.value)
    assert not trace.exists(), "the checkpoint ran code"


@pytest.mark.parametrize(
    "left",
    [
        ("step_00000002.tmp", "step_00000002.sha256.tmp"),
        ("step_00000002.tmp", "step_00000002.pt.sha256"),  # killed between the two renames
        ("step_00000002.sharded.tmp",),
        ("step_00000002.removed.tmp",),
    ],
)
def test_interrupted_save_is_removed_and_the_previous_checkpoint_resumed(left, tmp_path, caplog):
    form = "file" if len(left) == 2 else "sharded"
    save_epochs(tiny(tmp_path, None, form == "sharded"), [1.0, 1.0])
    newest = path_of(tmp_path, 2, form)
    for file, name in zip([newest, sums_of(newest)], left, strict=False):
        file.rename(tmp_path / name)
    assert resume(tiny(tmp_path, None)).step == 1
    assert not warnings_in(caplog), "what is not complete is not a damaged checkpoint"
    assert names(tmp_path) == [path_of(tmp_path, 1, form).name]


def test_format_depends_on_size_and_ranks():
    results = [
        is_sharded_format("auto", ranks, size)
        for ranks, size in ((2, SHARDED_FROM), (2, SHARDED_FROM - 1), (1, 2**50))
    ]
    assert results == [True, False, False]
    assert (is_sharded_format("full", 2, SHARDED_FROM), is_sharded_format("sharded", 1, 1)) == (
        False,
        True,
    )
