"""What users pass by mistake to a trainer of a Lab: each is one message, and no error of torch."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from slow_rows import slow_but
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from worlds import run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError, SampleError, TrainingError

SGD = partial(torch.optim.SGD, lr=0.1)
INPUTS = torch.rand(20, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, torch.arange(20) % 3)
BATCH = INPUTS[:8], torch.arange(8) % 3


class Stream(IterableDataset):
    def __len__(self):
        return 20

    def __iter__(self):
        yield from DATA


class Wrapped(nn.Module):
    """A model whose outputs are wrapped."""

    def __init__(self, wrap):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.wrap = wrap

    def forward(self, inputs):
        return self.wrap(self.layer(inputs))


def make(lab: Lab, task: Any = None, model: nn.Module | None = None, **options: Any) -> Any:
    net = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = options.pop("optimizer", SGD)
    return lab.trainer(net, task or tasks.Classification(), optimizer, 8, **options)


LOADER = DataLoader(DATA, 8)
MAP = "must be a map-style dataset, with __len__, __getitem__ and at least one sample, got "
OF_LOADER = f"{MAP}a DataLoader. Pass its dataset, loader.dataset: "
OF_STREAM = f"{MAP}the IterableDataset Stream. A stream has no samples by number"
SCORES = "the model returns dict with scores, but "
MISTAKES: dict[str, tuple[Any, str]] = {
    "a loader": (lambda lab: [*make(lab).batches(LOADER, 0)], f"the dataset: {OF_LOADER}"),
    "a loader in evaluate": (lambda lab: make(lab).evaluate(LOADER), f"the dataset: {OF_LOADER}"),
    "a loader as train": (lambda lab: make(lab).fit(LOADER, DATA, 1), f"train: {OF_LOADER}"),
    "a loader as validation": (
        lambda lab: make(lab).fit(DATA, LOADER, 1),
        f"validation: {OF_LOADER}",
    ),
    "a stream": (lambda lab: make(lab).evaluate(Stream()), f"the dataset: {OF_STREAM}"),
    "a stream as train": (
        lambda lab: make(lab).fit(Stream(), None, 1),
        "epochs=1: a stream has no epochs: it begins again at its end. Use max_steps",
    ),
    "no training set": (
        lambda lab: make(lab).fit(None, DATA, 1),
        "train: must be a map-style dataset, with",
    ),
    "no model": (
        lambda lab: lab.trainer(None, tasks.Classification(), SGD, 8),
        "model: must be a torch.nn.Module, got NoneType",
    ),
    "a class as the model": (
        lambda lab: lab.trainer(Wrapped, tasks.Classification(), SGD, 8),
        "model: must be a torch.nn.Module, got the class Wrapped. Call it: Wrapped(...)",
    ),
    "an array in forward": (
        lambda lab: make(lab).forward(np.zeros((8, 4))),
        "forward: the argument 0 is ndarray, but must be a tensor. Use torch.as_tensor",
    ),
    "no optimizer": (
        lambda lab: make(lab, optimizer=lambda parameters: None),
        "optimizer: the function of parameters must return an optimizer, for example",
    ),
    "an optimizer of another model": (
        lambda lab: make(lab, optimizer=lambda parameters: SGD(nn.Linear(4, 3).parameters())),
        "optimizer: has a parameter of the shape [3, 4] that is none of this trainer's model",
    ),
    "a directory for the weights": (
        lambda lab: make(lab).save("."),
        "save: . is a directory, but a model that is not of transformers or PEFT is written as one "
        "file. Use the name of a file, for example model.safetensors",
    ),
    "number": (
        lambda lab: make(lab, lambda outputs, targets: 1.0).step(*BATCH),
        "the loss must return a tensor, (losses, weights) or (sum, weight), got float. Return the",
    ),
    "number for the example": (
        lambda lab: make(lab, lambda outputs, targets: 1.0, example=DATA[0]),
        "the loss must return a tensor, (losses, weights) or (sum, weight), got float. Return the",
    ),
    "nothing": (
        lambda lab: make(lab, lambda outputs, targets: None).step(*BATCH),
        "the loss must return a tensor, (losses, weights) or (sum, weight), got NoneType. Return",
    ),
    "array": (
        lambda lab: make(lab).step(np.zeros((8, 4)), BATCH[1]),
        "step: inputs: must be a tensor, or a tuple or dict of tensors, got ndarray. Use torch.a",
    ),
    "array as targets": (
        lambda lab: make(lab).step(BATCH[0], np.zeros(8)),
        "step: targets: must be a tensor, or a tuple or dict of tensors, got ndarray. Use torch",
    ),
    "array in predict": (
        lambda lab: make(lab).predict(np.zeros((8, 4))),
        "predict: inputs: must be a tensor, or a tuple or dict of tensors, got ndarray.",
    ),
    "sizes": (
        lambda lab: make(lab).step(BATCH[0], BATCH[1][1:]),
        "step: got 8 inputs and 7 targets; a sample has one of each",
    ),
    "LBFGS": (
        lambda lab: make(lab, optimizer=torch.optim.LBFGS),
        "optimizer: the step of LBFGS needs the argument closure, by which it would compute the lo",
    ),
    "optimizer": (
        lambda lab: make(lab, optimizer=SGD(nn.Linear(4, 3).parameters())),
        "optimizer: must be a function of parameters, because",
    ),
    "outputs": (
        lambda lab: make(lab, model=Wrapped(lambda logits: {"scores": logits})).step(*BATCH),
        f"{SCORES}Classification needs one tensor [b, ...] for b samples, or a part named logits.",
    ),
    "outputs in evaluate": (
        lambda lab: make(lab, model=Wrapped(lambda logits: {"scores": logits})).evaluate(DATA),
        f"{SCORES}Classification needs one tensor",
    ),
    "outputs for tokens": (
        lambda lab: make(
            lab, tasks.Tokens(), Wrapped(lambda logits: {"scores": logits[:, None]})
        ).step(BATCH[0], BATCH[1][:, None]),
        f"{SCORES}Tokens needs one tensor [b, ...] for b samples, or a part named logits.",
    ),
    "collate_fn": (
        lambda lab: make(lab, collate_fn=3),
        "collate_fn=3: must be a function of a list of samples, or None",
    ),
    "place of the targets": (
        lambda lab: make(lab, targets=1.5),
        "targets=1.5: must be a string or an integer or null",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_argument_is_one_message(mistake):
    attempt, message = MISTAKES[mistake]
    with (
        Lab(device="cpu") as lab,
        pytest.raises((ConfigError, TrainingError, SampleError)) as error,
    ):
        attempt(lab)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is None


def of_logits(strategy: str, wrapped: bool) -> list[float]:
    """Train classification and tokens with logits that are a part of the outputs, or all of
    them.
    """
    values = []
    with Lab(strategy, device="cpu", timeout=30) as lab:
        for task, shape in ((tasks.Classification(), [3]), (tasks.Tokens(), [1, 3])):

            def wrap(logits: torch.Tensor, shape: Any = shape) -> Any:
                logits = logits.view(-1, *shape)
                return {"logits": logits, "extra": logits.sum(1)} if wrapped else logits

            trainer = make(lab, task, Wrapped(wrap))
            targets = torch.arange(20) % 3
            data = TensorDataset(INPUTS, targets.view(-1, *shape[:-1]))
            values += [trainer.step(*batch).item() for batch in trainer.batches(data, 0)]
            values.append(trainer.evaluate(data)["accuracy"])
    return values


@pytest.mark.parametrize(
    "strategy", slow_but(["single", "ddp"], ["single", "scratch", "dp", "ddp", "fsdp", "tp"])
)
def test_tasks_take_the_logits_of_dicts(strategy):
    (expected,) = run_world(1, of_logits, "single", False, timeout=60)
    ranks = 1 if strategy in ("single", "dp") else 2
    for values in run_world(ranks, of_logits, strategy, True, timeout=60):
        assert values == pytest.approx(expected, abs=1e-6)


def test_fit_without_validation_has_no_metrics_of_it():
    with Lab(device="cpu") as lab:
        trainer = make(lab)
        results = trainer.fit(DATA, None, epochs=2)
        assert results["train_loss"] > 0
        assert not [name for name in results if name.startswith("val_")]
        assert trainer.progress.epoch == 2
