"""`model.weights=FILE`."""

import os
import pickle
from functools import partial

import pytest
import torch
from launches import OWN, main_in_world, only_run, read_metrics
from own_models import Plain
from safetensors.torch import save_file
from torch import nn
from worlds import run_world

from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.models.weights import match_weights, read

SHAPE = {"in_channels": 1, "image_size": 28, "num_classes": 10}


def load(model: nn.Module, state: dict[str, torch.Tensor], num_classes: int, key: str) -> list[str]:
    """Load those weights that fit into the model and return the notes."""
    matched, notes = match_weights(model.state_dict(), state, num_classes, key)
    model.load_state_dict(matched, strict=False)
    return notes


def save(state: dict, path: str) -> None:
    save_file(state, path) if path.endswith(".safetensors") else torch.save(state, path)


@pytest.mark.parametrize(
    ("name", "convert"),
    [
        ("net.safetensors", dict),
        ("net.pt", lambda state: {f"module.{name}": tensor for name, tensor in state.items()}),
        ("net.pt", lambda state: {"state_dict": state, "epoch": 3}),
        (
            "net.pt",
            lambda state: {
                "model": {f"module.{name}": tensor for name, tensor in state.items()},
                "lr": 0.1,
            },
        ),
    ],
    ids=["safetensors", "DataParallel", "nested", "nested DataParallel"],
)
def test_weights_are_read_from_files(name, convert, tmp_path):
    source = Plain(**SHAPE)
    target = Plain(**SHAPE)
    save(convert(source.state_dict()), f"{tmp_path}/{name}")
    assert load(target, read(f"{tmp_path}/{name}"), 10, "model.weights=net.pt") == [
        "model.weights=net.pt: loaded"
    ]
    assert all(
        torch.equal(value, source.state_dict()[name]) for name, value in target.state_dict().items()
    )


class Runs:
    """A pickle that would run a command."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda path: torch.save({"net": Runs()}, path),
            "has other objects than tensors, which could run code",
        ),
        (
            lambda path: path.write_bytes(pickle.dumps(Runs())),
            "has other objects than tensors, which could run code",
        ),
        (
            lambda path: torch.save(Plain(**SHAPE), path),
            "has other objects than tensors, which could run code",
        ),
        (lambda path: path.write_bytes(b"junk"), "is not a file of weights, or is damaged"),
        (lambda path: path.write_bytes(b""), "is not a file of weights, or is damaged"),
        (
            lambda path: torch.save([1], path),
            "must be a dict of tensors by name, or have .*; it is a list. Save the weights",
        ),
        (
            lambda path: torch.save({"lr": 0.1, "epoch": 1}, path),
            "must be a dict of tensors .*; it has lr, epoch",
        ),
        (
            lambda path: torch.save(
                {"model": {"a": torch.ones(1)}, "state_dict": {"a": torch.ones(1)}}, path
            ),
            "must be .* have exactly one under state_dict, model_state_dict, model; it has model, "
            "state_dict",
        ),
    ],
)
def test_file_without_weights_is_refused_and_runs_no_code(write, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "net.pt")
    with pytest.raises(ConfigError, match=f"^model.weights=net.pt: {message}"):
        read("net.pt")
    assert not (tmp_path / "ran").exists()
    (tmp_path / "net.safetensors").write_bytes(b"no header")
    with pytest.raises(ConfigError, match="is not a file of weights, or is damaged"):
        read("net.safetensors")


@pytest.mark.parametrize(
    ("path", "reason"), [("nothing.pt", "No such file"), (".", "Is a directory")]
)
def test_file_that_cannot_be_read_is_named(path, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NodeError, match=f"model.weights={path}: cannot be read on .* \\({reason}"):
        read(path)


def test_head_of_another_number_of_classes_keeps_its_initial_weights():
    source = Plain(1, 28, 5)
    target = Plain(**SHAPE)
    before = target.head.weight.clone()
    notes = load(target, source.state_dict(), 10, "net.pt")
    assert notes[1:] == ["head.weight, head.bias: initialised anew, for 10 classes instead of 5"]
    assert torch.equal(target.head.weight, before)
    assert torch.equal(target.entry.weight, source.entry.weight)


def test_all_differences_are_in_one_message():
    state = Plain(**SHAPE, hidden=8).state_dict()
    state["extra"] = state.pop("scale")
    with pytest.raises(ConfigError) as error:
        load(Plain(**SHAPE), state, 10, "model.weights=net.pt")
    assert str(error.value).startswith(
        "model.weights=net.pt: are not the weights of this model: 1 missing: scale; 1 not in the "
        "model: extra; 7 of another shape: entry.weight [8, 784] instead of [16, 784], entry.bias "
        "[8] instead of [16], blocks.0.inner.weight [8, 8] instead of [16, 16] and 4 more. Use"
    )


def test_counters_that_old_files_lack_are_not_missed():
    model = nn.Sequential(nn.BatchNorm2d(3))
    state = {
        name: value
        for name, value in model.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    assert load(model, state, 10, "net.pt") == ["net.pt: loaded"]


def test_first_convolution_is_summed_for_grey_images():
    colour = nn.Sequential(nn.Conv2d(3, 4, 3))
    grey = nn.Sequential(nn.Conv2d(1, 4, 3))
    notes = load(grey, colour.state_dict(), 10, "net.pt")
    assert notes[1:] == ["0.weight: summed over its 3 channels, because the images have 1"]
    images = torch.rand(2, 1, 8, 8)
    assert torch.allclose(grey(images), colour(images.expand(-1, 3, -1, -1)), atol=1e-6)


def test_run_begins_from_the_weights_and_resumes_without_them(tmp_path):
    model = Plain(**SHAPE)
    torch.save(model.state_dict(), tmp_path / "net.pt")
    overrides = [
        *OWN,
        "model._target_=own_models.Plain",
        f"model.weights={tmp_path}/net.pt",
        "optimizer.lr=1e-6",
        "name=a",
    ]
    run = partial(
        run_world, 2, main_in_world, *overrides, "strategy=fsdp", f"runs_dir={tmp_path}/runs"
    )
    run("epochs=1")
    folder = only_run(tmp_path / "runs")
    trained = torch.load(folder / "checkpoints" / "step_00000005.pt", weights_only=True)["model"]
    moved = max(
        (trained[name] - value).abs().max().item() for name, value in model.state_dict().items()
    )
    assert 0 < moved < 1e-4, "the run did not begin from these weights"
    assert (folder / "train.log").read_text().count("net.pt: loaded") == 1
    (tmp_path / "net.pt").unlink()
    run("epochs=2")
    assert [record["epoch"] for record in read_metrics(folder)] == [1, 2]
