"""A checkpoint with optimizer options of another release of torch is resumed.

That of another optimizer is not.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same, first_launch, train
from launches import SMALL, refusal_in_world
from slow_rows import slow_but
from torch import nn
from torch.optim import SGD, Adam, AdamW, RAdam, RMSprop
from torch.utils.data import TensorDataset
from worlds import run_world

from ddp_lab import Lab
from ddp_lab.checkpoints.files import STATE, SUMS, sha256, write_file
from ddp_lab.checkpoints.same_optimizer import SavedOptimizer, is_same, options_of, states_of
from ddp_lab.config.errors import ConfigError


def lacks(optimizer: dict) -> None:
    for group in optimizer["param_groups"]:
        del group["differentiable"]


def has_more(optimizer: dict) -> None:
    for group in optimizer["param_groups"]:
        group["of_another_release"] = True


def of_an_older_version(optimizer: dict) -> None:
    lacks(optimizer)
    del optimizer["kind"]


CHANGES = {"lacks": lacks, "has_more": has_more, "older": of_an_older_version}


def change(checkpoint: Path, how: str) -> None:
    """Change the optimizer in a checkpoint, and its hashes."""
    if checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True)
        CHANGES[how](state["optimizer"])
        write_file(checkpoint, state)
        return
    state = json.loads((checkpoint / STATE).read_text())
    CHANGES[how](state["optimizer"])
    (checkpoint / STATE).write_text(json.dumps(state))
    names = [line.split()[1] for line in (checkpoint / SUMS).read_text().splitlines()]
    (checkpoint / SUMS).write_text(
        "".join(f"{sha256(checkpoint / name)}  {name}\n" for name in names)
    )


@pytest.mark.parametrize("form", slow_but(["full"], ["full", "sharded"]))
@pytest.mark.parametrize("how", slow_but(["lacks"], CHANGES))
def test_run_resumes_a_checkpoint_of_another_release_of_torch(how, form, tmp_path):
    overrides = f"checkpoint.format={form}", "optimizer.momentum=0.9"
    first = first_launch(tmp_path.parent, 1, ("epochs=1", *overrides))
    for name in ("straight", "changed"):
        shutil.copytree(first, tmp_path / name)
    (checkpoint,) = [
        path
        for path in (tmp_path / "changed" / "checkpoints").glob("step_*")
        if path.suffix != ".sha256"
    ]
    change(checkpoint, how)
    results = [
        train(tmp_path, name, "epochs=2", "checkpoint.format=full")
        for name in ("straight", "changed")
    ]
    assert_same(*results, tolerance=0)
    log = (tmp_path / "changed" / "train.log").read_text()
    said = (
        "has the option of_another_release, which"
        if how == "has_more"
        else "has no option differentiable, of which the values"
    )
    assert log.count(f"the optimizer in the checkpoint {said}") == 1
    line = [
        *SMALL,
        f"runs_dir={tmp_path}",
        "name=changed",
        "epochs=3",
        "optimizer=adamw",
        "scheduler=constant",
    ]
    ((code, printed),) = run_world(1, refusal_in_world, " ".join(line))
    assert (code, printed.count("was written with another optimizer: its options are ")) == (
        2,
        1,
    ), printed


def lab_trainer(lab: Lab, optimizer):
    return lab.trainer(nn.Linear(4, 2), nn.MSELoss(reduction="none"), optimizer, batch_size=4)


@pytest.mark.parametrize("how", CHANGES)
def test_lab_resumes_a_checkpoint_of_another_release_of_torch(how, tmp_path):
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
    optimizer = partial(Adam, lr=0.1)
    with Lab(device="cpu") as lab:
        trainer = lab_trainer(lab, optimizer)
        trainer.fit(data, data, epochs=1)
        trainer.checkpoint(tmp_path)
        change(next(tmp_path.glob("step_*.pt")), how)
        expected = trainer.fit(data, data, epochs=2)
        other = lab_trainer(lab, optimizer)
        assert other.resume(tmp_path) == (1, 0)
        results = other.fit(data, data, epochs=2)
        assert {key: results[key] for key in results if "loss" in key} == {
            key: expected[key] for key in results if "loss" in key
        }
        with pytest.raises(
            ConfigError, match="was written with another optimizer: its options are"
        ):
            lab_trainer(lab, partial(SGD, lr=0.1, momentum=0.9)).resume(tmp_path)


MADE = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "adam": partial(Adam, lr=0.1),
    "adamw": partial(AdamW, lr=0.1),
    "radam": partial(RAdam, lr=0.1),
    "rmsprop": partial(RMSprop, lr=0.1),
}


def made(name: str) -> torch.optim.Optimizer:
    return MADE[name]([nn.Parameter(torch.ones(3))])


def saved(name: str, kind: bool, change: str = "") -> SavedOptimizer:
    optimizer = made(name)
    options = {
        "": set,
        "lacks": lambda names: names - {"maximize"},
        "has_more": lambda names: names | {"new"},
    }[change]
    states = states_of(optimizer)
    assert states is not None
    return SavedOptimizer(
        type(optimizer).__name__ if kind else None, options(options_of(optimizer)), states
    )


# Whether a checkpoint of the first optimizer is one of the second: with equal options; with a
# recorded class; without it.
SAME = {
    ("sgd", "sgd"): (True, True, True),
    ("sgd", "momentum"): (True, True, False),
    ("momentum", "sgd"): (True, True, False),
    ("adam", "adam"): (True, True, True),
    ("adam", "adamw"): (True, False, True),  # whose state and options are the same
    ("adam", "radam"): (False, False, None),  # has fewer options, as if a release had added some
    ("adam", "sgd"): (False, False, False),
    ("sgd", "adam"): (False, False, False),
    ("momentum", "adam"): (False, False, False),
    ("rmsprop", "sgd"): (False, False, False),
    ("rmsprop", "rmsprop"): (True, True, True),
}


@pytest.mark.parametrize(("first", "second"), SAME)
def test_optimizer_is_identified_by_its_options_its_class_or_its_state(first, second):
    equal, by_class, by_state = SAME[first, second]
    for kind in (True, False):
        assert is_same(saved(first, kind), made(second)) is equal or by_state is None
        for change in ("lacks", "has_more"):
            expected = by_class if kind else by_state
            assert (
                is_same(saved(first, kind, change), made(second)) is expected or expected is None
            ), (kind, change)


def test_states_are_those_of_a_step():
    assert states_of(made("momentum")) == {"momentum_buffer"}
    assert states_of(made("sgd")) == set()
    assert states_of(made("adamw")) == {"step", "exp_avg", "exp_avg_sq"}
