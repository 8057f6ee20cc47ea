"""Batches that are trees: several inputs, dicts, and outputs that are no tensor.

The models work in float64, so that the weights of any strategy on any number of ranks are those of
single within 1e-12. The last batch is partial: on two ranks one of them has fewer samples of it
than the other or, of the first FEW samples, none.
"""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset, TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError, SampleError

SIZE = 21
FEW = 17
BATCH = 8
WIDTH = 6
WORDS = 11
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STRATEGIES = ["single", "scratch", "ddp", "fsdp", "tp", "dp"]
ALONE = ("single", "dp")


class Two(nn.Module):
    """Two inputs, which a tuple passes by position."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(4, WIDTH)
        self.right = nn.Linear(3, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, left, right):
        return self.head(torch.tanh(self.left(left) - self.right(right)))


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor
    attentions: None = None


class Masked(nn.Module):
    """Tokens with a mask, which a dict passes by name; returns an object.

    A mask of nothing makes NaN.
    """

    def __init__(self, wrap=Output):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.ones(WIDTH))  # of no layer
        self.wrap = wrap

    def forward(self, input_ids, attention_mask):
        weights = attention_mask / attention_mask.sum(1, keepdim=True)
        hidden = self.scale * torch.tanh(
            self.mix((self.tokens(input_ids) * weights[..., None]).sum(1))
        )
        return self.wrap(self.head(hidden), hidden)


class Heads(nn.Module):
    """One input and a dict as the output, of which a part has no row for each sample."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, WIDTH)
        self.box = nn.Linear(WIDTH, 4)
        self.label = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, inputs):
        hidden = torch.tanh(self.body(inputs))
        return {
            "box": self.box(hidden),
            "label": self.label(hidden),
            "penalty": self.scale.square().sum(),
        }


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(
        SIZE, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


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


class DifferentLengths(Texts):
    """The same without padding, and with text that is no input."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        length = int(sample["attention_mask"].sum())
        return {"ids": sample["input_ids"][:length], "label": sample["labels"], "text": "some"}


def pad_to_longest(samples: list[dict]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True)
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids > 0).double(), "labels": labels}


class TwoTargets:
    """Samples with a dict as the target."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return numbers(4)[index], {"box": numbers(4, seed=1)[index], "label": index % 3}


def of_heads(outputs, targets):
    box = (outputs["box"] - targets["box"]).square().sum(1)
    return (
        box
        + F.cross_entropy(outputs["label"], targets["label"], reduction="none")
        + 0.01 * outputs["penalty"]
    )


def of_hidden(outputs, targets):
    assert targets is None
    return outputs.hidden.square().sum(1), 1 + outputs.logits.detach().abs().sum(1)


# The model, the loss, the dataset, and arguments of the trainer.
CASES: dict[str, tuple[Any, Any, Any, dict]] = {
    "tuple": (
        Two,
        tasks.Regression,
        TensorDataset(numbers(4), numbers(3, seed=1), numbers(2, seed=2)),
        {"targets": 2},
    ),
    "dict": (Masked, tasks.Classification, Texts(), {"targets": "labels"}),
    "dict_of_logits": (
        partial(Masked, lambda logits, hidden: {"logits": logits, "hidden": hidden}),
        tasks.Classification,
        Texts(),
        {"targets": "labels"},
    ),
    "collated": (
        Masked,
        tasks.Classification,
        DifferentLengths(),
        {"targets": "labels", "collate_fn": pad_to_longest},
    ),
    "targets": (Heads, lambda: of_heads, TwoTargets(), {}),
}


class WithoutLabels(Texts):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        del sample["labels"]
        return sample


CASES["no_targets"] = (Masked, lambda: of_hidden, WithoutLabels(), {"targets": None})


def train(
    strategy: str, case: str, accumulate: int = 1, example: bool = True, **options
) -> dict[str, Any]:
    """Train an epoch of all samples and one of the first few, and evaluate both."""
    make, loss, data, arguments = CASES[case]
    with Lab(strategy, device="cpu", timeout=30, **options) as lab:
        model = make().double()
        with_example = {"example": data[0]} if example else {}
        trainer = lab.trainer(model, loss(), SGD, BATCH, accumulate, **arguments, **with_example)
        few = Subset(data, range(FEW))
        epochs = enumerate((data, few))
        losses = [
            trainer.step(*batch).item()
            for epoch, each in epochs
            for batch in trainer.batches(each, epoch)
        ]
        evaluation = trainer.evaluate(data) | {
            f"few {key}": value for key, value in trainer.evaluate(few).items()
        }
        weights = {}
        for name, tensor in trainer.strategy.module.state_dict().items():
            weights[name] = (
                tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
            )
    return {"losses": losses, "evaluation": evaluation, "weights": weights}


@once
def alone(case: str) -> dict[str, Any]:
    return train("single", case)


def all_of(strategy: str, accumulate: int) -> dict[str, dict]:
    """Train each case, with an example of a sample if without accumulation.

    Without an example nobody freezes the head that the loss of `no_targets` does not use.
    """
    return {
        case: train(strategy, case, accumulate, accumulate == 1 or case == "no_targets")
        for case in CASES
    }


@once
def found_on(strategy: str, accumulate: int) -> list[dict[str, dict]]:
    return run_world(1 if strategy in ALONE else 2, all_of, strategy, accumulate, timeout=200)


def require_equal(trained: dict[str, Any], expected: dict[str, Any]) -> None:
    assert trained["losses"] == pytest.approx(expected["losses"], abs=1e-12)
    assert trained["evaluation"] == pytest.approx(expected["evaluation"], abs=1e-12)
    assert trained["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        assert (trained["weights"][name] - tensor).abs().max() <= 1e-12, name


SLOW = [("single", 1), ("scratch", 1), ("ddp", 1), ("fsdp", 3), ("dp", 1)]
# the same strategies with another number of micro-batches, and tp, which shards layers as mesh does
EXTRA = [("scratch", 3), ("fsdp", 1), ("tp", 1), ("tp", 3), ("dp", 3)]


def marks_of(strategy: str, steps: int) -> list:
    if (strategy, steps) in EXTRA:
        return [pytest.mark.extra]
    return [pytest.mark.slow] if (strategy, steps) in SLOW else []


@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [
        pytest.param(strategy, steps, marks=marks_of(strategy, steps))
        for strategy in STRATEGIES
        for steps in (1, 3)
    ],
)
def test_batches_that_are_trees_give_the_weights_of_single(strategy, accumulate):
    for rank in found_on(strategy, accumulate):
        for case, trained in rank.items():
            require_equal(trained, alone(case))


def start(lab: Lab, case: str, data: Any, step: Any, changed: dict) -> None:
    """Make a trainer of a case with changed arguments, and take a step.

    The step has the first batch, or another one.
    """
    make, loss, samples, arguments = CASES[case]
    keywords = {
        "model": make,
        "loss": loss(),
        "optimizer": SGD,
        "batch_size": BATCH,
        **arguments,
        **changed,
    }
    trainer = lab.trainer(keywords.pop("model")().double(), **keywords)
    batch = next(trainer.batches(samples if data is None else data, 0)) if step is None else step
    trainer.step(*batch)


def refused_by(
    strategy: str = "single",
    case: str = "tuple",
    data: Any = None,
    step: Any = None,
    options: dict | None = None,
    **changed: Any,
) -> str:
    """Return the message with which `start` ends."""
    with Lab(strategy, device="cpu", timeout=20, **options or {}) as lab:
        with pytest.raises((ConfigError, SampleError)) as error:
            start(lab, case, data, step, changed)
        assert error.value.__cause__ is None
        assert "\n" not in str(error.value)
        return str(error.value)


PAIR = torch.zeros(BATCH, 4), torch.zeros(BATCH, 3)
WORD = [{"a": torch.zeros(4), "b": "word", "y": 0}] * SIZE
# What is changed, and the message.
REFUSED = {
    "sizes": (
        {"step": ((PAIR[0], PAIR[1][1:]), torch.zeros(BATCH, 2))},
        "step: all parts of a batch must have the same number of samples, but inputs[0] has 8, "
        "inputs[1] has 7, targets has 8.",
    ),
    "sizes of a dict": (
        {"step": ({"left": PAIR[0], "right": PAIR[1]}, {"box": torch.zeros(6, 2)})},
        'must have the same number of samples, but inputs["left"] has 8, inputs["right"] has 8, '
        'targets["box"] has 6.',
    ),
    "no rows": (
        {"step": ((PAIR[0], torch.zeros(())), torch.zeros(BATCH, 2))},
        "step: inputs[1] has no dimension, but must",
    ),
    "words": (
        {"step": ({"left": ["some"] * BATCH}, torch.zeros(BATCH))},
        'step: inputs["left"]: must be a tensor, or a tuple or dict of tensors, got list. Text '
        "must become numbers",
    ),
    "words of a dataset": (
        {"data": WORD, "targets": "y"},
        'the dataset: sample 0: inputs["b"] is str. Text must become numbers, for example those of '
        "tokens",
    ),
    "key": (
        {"step": ({"left": PAIR[0], "mask": PAIR[1]}, torch.zeros(BATCH, 2))},
        "the model: forward got an unexpected keyword argument 'mask'. Its parameters are left, "
        "right. Inputs that are a dict",
    ),
    "no key": (
        {"step": (PAIR[0], torch.zeros(BATCH, 2))},
        "the model: forward missing 1 required positional argument: 'right'. Its parameters are "
        "left, right. ",
    ),
    "key of the example": (
        {"example": {"left": PAIR[0][0], "mask": PAIR[1][0], "y": torch.zeros(2)}, "targets": "y"},
        "the model: forward got an unexpected keyword argument 'mask'. Its parameters are left, "
        "right. ",
    ),
    "no place": (
        {"targets": 1},
        "the dataset: sample 0 must be (input, target), got tuple of 3. Name the place of its "
        "target, ",
    ),
    "place": (
        {"targets": 5},
        "the dataset: sample 0 must be a tuple with the target at targets=5 and inputs, got tuple "
        "of 3.",
    ),
    "dict in place of a tuple": (
        {"data": Texts(), "targets": 1},
        "sample 0 must be (input, target), got dict with input_ids, labels, attention_mask. Name "
        "the key of its target, for ex",
    ),
    "no such key": (
        {"data": Texts(), "targets": "label"},
        'sample 0 must be a dict with the target "label" and inputs, got dict',
    ),
    "no logits": (
        {"model": partial(Masked, lambda logits, hidden: {"scores": logits}), "case": "dict"},
        "the model returns dict with scores, but Classification needs one tensor [b, ...] for b "
        "samples, or a part named",
    ),
    "targets of a task": (
        {"case": "targets", "loss": tasks.Classification(), "model": lambda: nn.Linear(4, 3)},
        "Classification: needs targets that are one tensor [b, ...], got targets that are a dict "
        "with box, label. Choose one",
    ),
    "no targets": (
        {"case": "no_targets", "loss": tasks.Classification()},
        "Classification: needs targets that are one tensor [b, ...], got no targets. ",
    ),
    "lengths": (
        {
            "case": "dict",
            "data": DifferentLengths(),
            "targets": "label",
            "collate_fn": lambda samples: samples[0] and {"label": 1},
        },
        'the batch from collate_fn must be a dict with the target "label" and inputs, got dict '
        "with label.",
    ),
    "few": (
        {"case": "collated", "collate_fn": lambda samples: pad_to_longest(samples[:1] * 3)},
        "the dataset: collate_fn must return a batch of the 1 sample that it got, got 3",
    ),
    "failing": (
        {"case": "collated", "collate_fn": lambda samples: samples.text},
        "the dataset: collate_fn failed for 1 sample: AttributeError: 'list' object has no "
        "attribute 'text'",
    ),
    "unpadded": (
        {
            "data": [
                (torch.zeros(2 + index % 2), torch.zeros(3), torch.zeros(2))
                for index in range(SIZE)
            ]
        },
        "their inputs[0] have the shapes [3] and [2]. Pad them",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistake_in_a_tree_is_one_line(name):
    changed, message = REFUSED[name]
    refusal = refused_by(**changed)
    shapes = message.replace("[3] and [2]", "X"), re.sub(r"\[[23]\] and \[[23]\]", "X", refusal)
    assert message in refusal or shapes[0] in shapes[1], refusal


CUT = {
    "split": {"devices": ["cpu", "cpu"], "num_microbatches": 2},
    "pipeline": {"num_microbatches": 2},
    "mesh": {},
}


def cut(strategy: str) -> tuple[str, list[float]]:
    """Return the message about inputs that are a dict, and the losses with targets that are one."""
    tokens = {"inputs": torch.zeros(4), "y": torch.zeros(3)}
    message = refused_by(
        strategy,
        options=CUT[strategy],
        model=lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)),
        example=tokens,
        targets="y",
    )
    with Lab(strategy, device="cpu", timeout=30, **CUT[strategy]) as lab:
        blocks = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)).double()
        data = TwoTargets()
        trainer = lab.trainer(
            blocks,
            lambda outputs, targets: (outputs - targets["box"]).square(),
            SGD,
            BATCH,
            example=data[0],
        )
        losses = [trainer.step(*batch).item() for batch in trainer.batches(data, 0)]
        return message, [*losses, trainer.evaluate(data)["loss"]]


@pytest.mark.parametrize("strategy", CUT)
def test_a_chain_that_is_cut_refuses_several_inputs_and_takes_dicts_as_targets(strategy):
    expected = run_world(1, cut, "split", timeout=60)[0][1]
    for message, losses in run_world(1 if strategy == "split" else 2, cut, strategy, timeout=60):
        # the strategy takes dicts, but a Sequential does not
        assert "forward got an unexpected keyword argument 'inputs'" in message
        assert losses == pytest.approx(expected, abs=1e-12)


def info_nce(outputs, targets):
    similarity = outputs["left"] @ outputs["right"].T
    return F.cross_entropy(similarity, torch.arange(len(similarity)), reduction="none")


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, WIDTH)

    def forward(self, left, right):
        return {"left": self.layer(left), "right": self.layer(right)}


def compare_views(lab: Lab, accumulate: int, with_example: dict, data: Any) -> None:
    trainer = lab.trainer(
        Views().double(), info_nce, SGD, BATCH, accumulate, targets=None, **with_example
    )
    trainer.step(*next(trainer.batches(data, 0)))


@pytest.mark.parametrize("example", [True, False])
def test_loss_that_compares_the_samples_of_a_tree_is_refused_where_the_batch_is_divided(example):
    data = TensorDataset(numbers(4), numbers(4, seed=1))
    with Lab(device="cpu") as lab:
        with_example = {"example": data[0]} if example else {}
        with pytest.raises(ConfigError, match=r"^loss: the loss is not a sum over samples: it "):
            compare_views(lab, 2, with_example, data)
        compare_views(lab, 1, with_example, data)


def test_predict_returns_what_the_model_returns():
    inputs = {
        "input_ids": torch.ones(3, 5, dtype=torch.int64),
        "attention_mask": torch.ones(3, 5, dtype=torch.float64),
    }
    with Lab(device="cpu") as lab:
        model = Masked().double()
        trainer = lab.trainer(model, tasks.Classification(), SGD, BATCH)
        outputs = trainer.predict(inputs)
        assert isinstance(outputs, Output)
        assert torch.equal(outputs.logits, model(**inputs).logits)
        assert trainer.predict(
            {key: tensor[:0] for key, tensor in inputs.items()}
        ).logits.shape == (0, 4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_trees_resume_and_are_read_by_workers(num_workers, tmp_path):
    make, loss, data, arguments = CASES["collated"]
    losses = []
    with Lab(device="cpu") as lab:
        for stop in (1, 2):
            torch.manual_seed(0)
            trainer = lab.trainer(
                make().double(), loss(), SGD, BATCH, **arguments, num_workers=num_workers
            )
            if stop == 2:
                assert trainer.resume(tmp_path) == (0, 1)
            for number, batch in enumerate(trainer.batches(data, 0)):
                losses.append(trainer.step(*batch).item())
                if stop == 1 and number == 0:
                    trainer.checkpoint(tmp_path)
    assert losses[3:] == losses[1:3]


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(4, 2)

    def forward(self, left, right):
        return {"logits": self.head(self.norm((left * right).view(-1, 2, 2)).flatten(1))}


def statistics() -> list[int]:
    """Return how many batches the BatchNorm layer of this rank counted after each step."""
    data = TensorDataset(numbers(4)[:FEW], numbers(4, seed=1)[:FEW], torch.arange(FEW) % 2)
    with Lab("ddp", device="cpu", timeout=30) as lab:
        trainer = lab.trainer(Normalised().double(), tasks.Classification(), SGD, BATCH, targets=2)
        counts = []
        for batch in trainer.batches(data, 0):
            trainer.step(*batch)
            counts.append(int(trainer.strategy.module.norm.num_batches_tracked))
    return counts


def test_sample_without_weight_does_not_count_in_the_statistics_of_a_rank():
    assert run_world(2, statistics, timeout=60) == [[1, 2, 3], [1, 2, 2]]
