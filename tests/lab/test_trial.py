"""The trial of a model in a Lab: what it freezes, finds and leaves alone.

It has two copies of the example.
"""

import contextlib
import io
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError, TrainingError
from ddp_lab.lab import trial as lab_trial
from ddp_lab.models import trial

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
NOTE = "2 parameters are not used in training, so they stay as they are: pooler.weight, pooler.bias"
UNFROZEN = "2 parameters are not used by two samples: pooler.weight, pooler.bias"
KEY = {"find_unused_parameters": True}


class Pooled(nn.Module):
    """A model with an unused pooler, a frozen part, statistics, dropout, and an expanded mask."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False).eval()
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.body = nn.Linear(4, 2)
        self.pooler = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(1, 4).expand(3, 4))

    def forward(self, inputs):
        return self.body(self.dropout(self.norm(self.frozen(inputs)) * self.mask[0]))


class Plain(nn.Module):
    """The same without statistics and random numbers, so that all strategies compute the same."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 2)
        self.pooler = nn.Linear(4, 4)

    def forward(self, inputs):
        return self.body(inputs)


class Images(nn.Module):
    """A model of images of numbers with a fraction."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.head = nn.Linear(2, 3)

    def forward(self, images):
        return self.head(self.conv(images).mean((2, 3)))


def samples(size: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.rand(size, 4, generator=generator), torch.rand(size, 2, generator=generator)
    )


def train(strategy: str, options: dict, path: str = "", example=True) -> list[float]:
    data = samples()
    with Lab(strategy, device="cpu", timeout=30, **options) as lab:
        with_example = {"example": data[0]} if example else {}
        trainer = lab.trainer(Plain(), tasks.Regression(), SGD, batch_size=8, **with_example)
        losses = [trainer.step(*batch).item() for batch in trainer.batches(data, 0)]
        if path:
            trainer.save(path)
    return losses


def refused(strategy: str) -> str:
    with pytest.raises(TrainingError) as error:
        train(strategy, {}, example=False)
    return str(error.value)


def refused_by_the_trial(**options) -> str:
    arguments = {"model": Plain(), "loss": tasks.Regression(), "example": samples()[0]} | options
    with Lab(device="cpu") as lab:
        model = arguments.pop("model")
        loss = arguments.pop("loss")
        with pytest.raises(ConfigError) as error:
            lab.trainer(model, loss, SGD, batch_size=8, **arguments)
    return str(error.value)


class Chosen(Plain):
    """A model that uses the pooler for some samples."""

    def forward(self, inputs):
        return self.body(self.pooler(inputs.float()) if inputs[0, 0] == 1 else inputs.float())


def different_examples() -> str:
    with Lab("ddp", device="cpu", timeout=30) as lab:
        numbers = torch.tensor([lab.rank, 0, 0, 0])  # integers, which the trial keeps
        with pytest.raises(ConfigError) as error:
            lab.trainer(
                Chosen(), tasks.Regression(), SGD, batch_size=8, example=(numbers, torch.ones(2))
            )
        return str(error.value)


def on_two(path: str) -> dict:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        outcomes: dict = {
            strategy: train(strategy, {}, f"{path}/{strategy}")
            for strategy in ("scratch", "ddp", "fsdp")
        }
        outcomes |= {
            f"{strategy} with the key": train(strategy, KEY) for strategy in ("scratch", "ddp")
        }
    outcomes["printed"] = printed.getvalue()
    outcomes |= {f"{strategy} refuses": refused(strategy) for strategy in ("scratch", "ddp")}
    outcomes["different"] = different_examples()
    data = TensorDataset(
        torch.randint(0, 256, (8, 1, 6, 6), dtype=torch.uint8), torch.arange(8) % 3
    )
    with Lab("ddp", device="cpu", timeout=30) as lab:
        trainer = lab.trainer(Images(), tasks.Classification(), SGD, batch_size=8, example=data[0])
        outcomes["images"] = [trainer.step(*batch).item() for batch in trainer.batches(data, 0)]
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("trial"))


@once
def two(folder: str) -> list[dict]:
    return run_world(2, on_two, folder)


@once
def alone(folder: str) -> list[float]:
    return train("single", {}, f"{folder}/single")


@pytest.mark.parametrize(
    "strategy", ["scratch", "ddp", "fsdp", "scratch with the key", "ddp with the key"]
)
def test_model_with_unused_parameters_trains_under_every_strategy(strategy, folder):
    for rank in two(folder):
        assert rank[strategy] == pytest.approx(alone(folder), rel=1e-6)


@pytest.mark.parametrize("strategy", ["single", "scratch", "ddp", "fsdp"])
def test_frozen_parameters_are_saved_as_they_are(strategy, folder):
    alone(folder), two(folder)
    saved = load_file(f"{folder}/{strategy}")
    with Lab(device="cpu"):
        start = Plain().state_dict()
    assert saved.keys() == start.keys()
    moved = {name for name, value in saved.items() if not torch.equal(value, start[name])}
    assert moved == {"body.weight", "body.bias"}


def test_notes_are_printed_by_rank_0_only(folder):
    first, second = two(folder)
    assert first["printed"].splitlines() == [NOTE, NOTE, UNFROZEN, UNFROZEN, UNFROZEN]
    assert second["printed"] == ""


@pytest.mark.parametrize("strategy", ["scratch", "ddp"])
def test_without_a_complete_example_the_error_names_it(strategy, folder):
    for rank in two(folder):
        message = rank[f"{strategy} refuses"]
        assert message.startswith(
            f"strategy={strategy}: the parameter pooler.weight got no gradient in a step on rank "
        )
        assert f'Lab("{strategy}", find_unused_parameters=True)' in message
        assert message.endswith("lab.trainer(..., example=dataset[0])")


@pytest.mark.parametrize("large", [0, 10**9], ids=["meta device", "real inputs"])
def test_trial_changes_nothing_but_what_it_freezes(large, monkeypatch):
    monkeypatch.setattr(trial, "LARGE", large)
    outcomes = {}

    def keep(model, *rest):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        modes = {name: module.training for name, module in model.named_modules()}
        state = torch.get_rng_state()
        idle, notes = lab_trial.try_model(model, *rest)
        outcomes["notes"] = notes
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert modes == {name: module.training for name, module in model.named_modules()}
        assert torch.equal(state, torch.get_rng_state())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert [
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        ] == TRAINED
        return idle, notes

    monkeypatch.setattr("ddp_lab.lab.prepared_model.try_model", keep)
    with Lab("ddp", device="cpu") as lab:
        model = Pooled()
        lab.trainer(model, tasks.Regression(), SGD, batch_size=8, example=samples()[0])
    assert outcomes["notes"] == [
        "4 parameters are frozen: frozen.0.weight, frozen.0.bias, frozen.1.weight and 1 more",
        NOTE,
    ]
    assert model.mask.is_contiguous()


TRAINED = ["norm.weight", "norm.bias", "body.weight", "body.bias"]


def test_images_are_tried_as_the_batches_have_them(folder):
    (losses, other) = (rank["images"] for rank in two(folder))
    assert losses == other
    assert len(losses) == 1


def raising(outputs, targets):
    raise KeyError("no such class")


def reduced(outputs, targets):
    return F.mse_loss(outputs, targets)


REFUSED = [
    ({"model": nn.Linear(3, 2)}, "the model: failed for inputs of shape [4]: RuntimeError: "),
    (
        {"model": nn.Linear(4, 3)},
        "the outputs must have the shape of the targets, [2, 2], got [2, 3]. Change the last layer",
    ),
    (
        {"model": nn.LSTM(4, 2)},
        "the model: it returns a tuple of 2, but Regression needs one tensor [b, ...] for b "
        "samples",
    ),
    (
        {"model": Plain().requires_grad_(False)},
        "the model: has nothing to train: all parameters are frozen",
    ),
    (
        {"loss": raising},
        "loss: failed for outputs of [2, 2] and targets of [2, 2], torch.float32, which are two "
        "copies",
    ),
    (
        {"loss": reduced},
        "the loss must return unreduced losses, [2, ...] for 2 samples, got []. Use "
        "reduction='none'",
    ),
    (
        {"example": (torch.rand(4), {})},
        "example: the target of a sample must be a tensor or a number, got dict",
    ),
    (
        {"example": ([1.0], 2)},
        "example: must be a sample of tensors, for example dataset[0], got list",
    ),
    (
        {"example": ({"x": torch.rand(4), "path": "a.png"}, 2)},
        'for example dataset[0], got dict, in which ["path"] is str',
    ),
]


@pytest.mark.parametrize(
    ("options", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED]
)
def test_mistake_that_the_trial_finds_is_one_message(options, message):
    assert message in refused_by_the_trial(**options)


def test_failure_of_the_loss_is_not_called_one_of_the_model():
    assert refused_by_the_trial(loss=raising).startswith("loss: failed for outputs of [2, 2]")


def test_ranks_with_different_examples_are_refused(folder):
    for rank in two(folder):
        assert rank["different"].startswith(
            "example: for that of rank 1 the model uses other parameters than for that of rank 0, "
            "for example pooler.bias. "
        )


def test_expanded_parameter_is_refused_by_name():
    model = Plain()
    model.body.bias = nn.Parameter(torch.ones(1).expand(2))
    message = refused_by_the_trial(model=model, example=None)
    assert message.startswith(
        "the model: the parameter body.bias is expanded: several of its elements share one place"
    )
