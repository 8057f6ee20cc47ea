"""The trial of a user's model before the run, and models of which training changes only a part."""

from functools import partial

import pytest
import torch
from launches import OWN, main_in_world, refusal_in_world
from own_models import ReadsValues, Wrong, finetuned
from torch import nn
from training import config_of
from worlds import run_world

from ddp_lab.config.errors import ConfigError
from ddp_lab.models import trial
from ddp_lab.models.trial import Trial, check_logits, freeze_unused, random_like
from ddp_lab.run.job import build
from ddp_lab.world.runtime import Runtime

SHAPE = {"in_channels": 1, "image_size": 28, "num_classes": 10}


def tried(model: nn.Module, runtime: Runtime | None = None) -> list[str]:
    images = random_like(torch.zeros(2, 1, 28, 28))
    return freeze_unused(
        model, Trial(images, partial(check_logits, classes=10)), runtime or Runtime("cpu"), "model._target_=net"
    )


@pytest.mark.parametrize("large", [0, 10**9], ids=["meta device", "real images"])
def test_unused_parameters_are_frozen_and_named(large, monkeypatch):
    monkeypatch.setattr(trial, "LARGE", large)
    model = finetuned(**SHAPE)
    assert tried(model) == [
        "7 parameters are frozen: scale, entry.weight, entry.bias and 4 more",
        "2 parameters are not used in training, so they stay as they are: spare.weight, spare.bias",
    ]
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["head.weight", "head.bias"]


@pytest.mark.parametrize("large", [0, 10**9])
def test_model_that_reads_values_is_tried_with_real_images(large, monkeypatch):
    monkeypatch.setattr(trial, "LARGE", large)
    (note,) = tried(ReadsValues(**SHAPE))
    assert note.endswith("they are: spare.weight, spare.bias"), "training_only is used in training"


def test_trial_changes_neither_the_model_nor_the_random_state():
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(784, 10))
    before, drawn = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    assert tried(model) == []
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("frozen", "has nothing to train: all parameters are frozen. Leave requires_grad=True for some"),
        ("pixels", r"failed for images of 1x28x28 .*: ValueError: 28 pixels are too few \(own_models.py, line"),
        ("pair", r"failed .* TypeError: it must return a tensor \[2, \.\.\.\] for 2 samples, got tuple"),
        ("pair when evaluated", r"failed .* TypeError: in evaluation mode it must return a tensor .*, got tuple"),
        ("classes", r"failed .* TypeError: it must return logits of shape \[2, 10\] \(batch, classes\), got \[2, 2\]"),
        ("only float32", r"failed .*: RuntimeError: no bf16 .* Use precision=float32, if a layer does not support bf16 on"),
    ],
)
def test_model_that_cannot_be_trained_is_refused(how, message):
    model, runtime = Wrong(**SHAPE, how=how), Runtime("cpu", "bf16")
    with pytest.raises(ConfigError, match=f"model._target_=net: {message}"):
        tried(model, runtime)


def drawn() -> dict[str, list[float]]:
    """Return what this rank draws in its first step, by strategy."""
    numbers = {}
    with Runtime("cpu", timeout=30) as runtime:
        for case in ("ddp partly_frozen", "tp partly_frozen", "pipeline partly_frozen"):
            build(config_of(case), runtime).trainer().eager_step.prepare()
            numbers[case.split()[0]] = torch.rand(4).tolist()
    return numbers


def test_replicas_and_stages_draw_different_dropout_masks_and_tp_ranks_the_same():
    first, second = run_world(2, drawn)
    assert first["ddp"] != second["ddp"]
    assert first["tp"] == second["tp"] == first["ddp"]
    assert first["pipeline"] != second["pipeline"]


def test_resume_with_other_frozen_parameters_is_refused(tmp_path):
    overrides = [*OWN, "model._target_=own_models.finetuned", "name=a", f"runs_dir={tmp_path}"]
    run_world(1, main_in_world, *overrides, "epochs=1")
    code, printed = run_world(1, refusal_in_world, f"{' '.join(overrides)} epochs=2 +model.trained=entry")[0]
    assert code == 2
    assert (
        "step_00000005.pt: the parameter entry.weight is trained in this launch and was frozen when the checkpoint was "
        "written. Freeze the same parameters, or begin a new run from these weights: model.weights="
    ) in printed
