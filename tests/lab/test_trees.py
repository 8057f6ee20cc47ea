"""Batches that are trees: several inputs, dicts, and outputs and targets that are no tensor, under every strategy.

The models work in float64, so that the weights of any strategy on any number of ranks are those of
single within 1e-12. The last batch is partial, and on two ranks one of them has no sample of it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks

SIZE, BATCH, WIDTH, WORDS = 17, 8, 6, 11
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STRATEGIES = ["single", "scratch", "ddp", "fsdp", "tp", "dp"]
ALONE = ("single", "dp")


class Two(nn.Module):
    """Two inputs, which a tuple passes by position."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, WIDTH), nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, left, right):
        return self.head(torch.tanh(self.left(left) - self.right(right)))


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor
    attentions: None = None


class Masked(nn.Module):
    """Tokens with a mask, which a dict passes by name; returns an object. A mask of nothing makes NaN."""

    def __init__(self, wrap=Output):
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.ones(WIDTH))  # of no layer
        self.wrap = wrap

    def forward(self, input_ids, attention_mask):
        weights = attention_mask / attention_mask.sum(1, keepdim=True)
        hidden = self.scale * torch.tanh(self.mix((self.tokens(input_ids) * weights[..., None]).sum(1)))
        return self.wrap(self.head(hidden), hidden)


class Heads(nn.Module):
    """One input and a dict as the output, of which a part has no row for each sample."""

    def __init__(self):
        super().__init__()
        self.body, self.box, self.label = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, inputs):
        hidden = torch.tanh(self.body(inputs))
        return {"box": self.box(hidden), "label": self.label(hidden), "penalty": self.scale.square().sum()}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(SIZE, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Texts:
    """Samples that are dicts, padded to one length."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = 2 + index % 4
        ids = torch.randint(1, WORDS, (5,), generator=generator)
        mask = (torch.arange(5) < length).double()
        return {"input_ids": ids * mask.long(), "labels": index % 4, "attention_mask": mask}


class Ragged(Texts):
    """The same without padding, and with text that is no input."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        length = int(sample["attention_mask"].sum())
        return {"ids": sample["input_ids"][:length], "label": sample["labels"], "text": "some"}


def pad_to_longest(samples: list[dict]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True)
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids > 0).double(), "labels": labels}


class Found:
    """Samples with a dict as the target."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return numbers(4)[index], {"box": numbers(4, seed=1)[index], "label": index % 3}


def of_heads(outputs, targets):
    box = (outputs["box"] - targets["box"]).square().sum(1)
    return box + F.cross_entropy(outputs["label"], targets["label"], reduction="none") + 0.01 * outputs["penalty"]


def of_hidden(outputs, targets):
    assert targets is None
    return outputs.hidden.square().sum(1), 1 + outputs.logits.detach().abs().sum(1)


# The model, the loss, the dataset, and arguments of the trainer.
CASES: dict[str, tuple[Any, Any, Any, dict]] = {
    "tuple": (Two, tasks.Regression, TensorDataset(numbers(4), numbers(3, seed=1), numbers(2, seed=2)), {"targets": 2}),
    "dict": (Masked, tasks.Classification, Texts(), {"targets": "labels"}),
    "dict_of_logits": (
        partial(Masked, lambda logits, hidden: {"logits": logits, "hidden": hidden}),
        tasks.Classification,
        Texts(),
        {"targets": "labels"},
    ),
    "collated": (Masked, tasks.Classification, Ragged(), {"targets": "labels", "collate_fn": pad_to_longest}),
    "targets": (Heads, lambda: of_heads, Found(), {}),
}


class WithoutLabels(Texts):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        del sample["labels"]
        return sample


CASES["no_targets"] = (Masked, lambda: of_hidden, WithoutLabels(), {"targets": None})


def train(strategy: str, case: str, accumulate: int = 1, example: bool = True, **options) -> dict[str, Any]:
    """Train two epochs, in which the last batch is partial, and evaluate."""
    make, loss, data, arguments = CASES[case]
    with Lab(strategy, device="cpu", timeout=30, **options) as lab:
        model = make().double()
        given = {"example": data[0]} if example else {}
        trainer = lab.trainer(model, loss(), SGD, BATCH, accumulate, **arguments, **given)
        losses = [trainer.step(*batch).item() for epoch in (0, 1) for batch in trainer.batches(data, epoch)]
        found = trainer.evaluate(data)
        weights = {}
        for name, tensor in trainer.strategy.module.state_dict().items():
            weights[name] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
    return {"losses": losses, "evaluation": found, "weights": weights}


@once
def alone(case: str) -> dict[str, Any]:
    return train("single", case)


def all_of(strategy: str, accumulate: int) -> dict[str, dict]:
    found = {case: train(strategy, case, accumulate) for case in CASES}
    for case in CASES:
        if case != "no_targets":  # without an example nobody freezes the head, which is not used
            found[f"{case} without example"] = train(strategy, case, accumulate, example=False)
    return found


@once
def found_on(strategy: str, accumulate: int) -> list[dict[str, dict]]:
    return run_world(1 if strategy in ALONE else 2, all_of, strategy, accumulate, timeout=120)


def require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-12)
    assert found["evaluation"] == pytest.approx(expected["evaluation"], abs=1e-12)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        assert (found["weights"][name] - tensor).abs().max() <= 1e-12, name


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batches_that_are_trees_give_the_weights_of_single(strategy, accumulate):
    for rank in found_on(strategy, accumulate):
        for case, found in rank.items():
            require_equal(found, alone(case.partition(" ")[0]))
