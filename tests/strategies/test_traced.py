"""Models that are no Chain under pipelines, which cut them by a trace: equal to one device."""

from functools import partial

import pytest
import torch
from slow_rows import extra
from torch import nn
from torch.utils.data import Dataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
WORDS = 11
LENGTH = 5


class Layer(nn.Module):
    """A block of a language model, which needs the mask, too."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.inner = nn.Linear(width, width)

    def forward(self, tokens, mask):
        normed = self.norm(tokens)
        attended, _ = self.attention(normed, normed, normed, key_padding_mask=mask)
        return tokens + self.inner(torch.relu_(attended))


class Language(nn.Module):
    """A language model in the usual layout: keywords, a mask, a dict as output; perhaps tied."""

    def __init__(self, is_tied: bool = False, layers: int = 2, width: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.register_buffer("scale", torch.tensor(1.5), persistent=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids, attention_mask):
        tokens = self.embedding(input_ids) * self.scale
        for layer in self.layers:
            tokens = layer(tokens, attention_mask == 0)
        return {"logits": self.head(self.norm(tokens)).mean(1), "tokens": tokens}


class Spare(Language):
    """The same with a layer that no step uses."""

    def __init__(self):
        super().__init__(is_tied=True)
        self.spare = nn.Linear(2, 2)


class Recurrent(nn.Module):
    """A layer that is called three times, the last time in the second of two stages."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.again = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids, attention_mask):
        tokens = self.again(torch.tanh(self.again(self.embedding(input_ids))))
        for layer in self.layers:
            tokens = layer(tokens, attention_mask == 0)
        return self.head(torch.tanh(self.again(tokens))).mean(1)


class Pictures(nn.Module):
    """A network with BatchNorm, activations in place and a skip over several blocks."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
            )
            for _ in range(4)
        )
        self.head = nn.Linear(4, WORDS)

    def forward(self, images):
        first = self.stem(images)
        features = first
        for block in self.blocks:
            features = block(features.clone())
        return self.head((features + first).mean((2, 3)))


class Sentences(Dataset):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(WORDS, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) <= 2 + index % 3).long()
        return {"input_ids": ids, "attention_mask": mask, "label": index % WORDS}


class Images(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.rand(1, 6, 6, generator=generator, dtype=torch.float64), index % WORDS


MODELS = {
    "language": (Language, Sentences, "label"),
    "deep": (partial(Language, layers=4), Sentences, "label"),
    "tied": (partial(Language, is_tied=True), Sentences, "label"),
    "deep, tied": (partial(Language, is_tied=True, layers=4), Sentences, "label"),
    "spare": (Spare, Sentences, "label"),
    "recurrent": (Recurrent, Sentences, "label"),
    "pictures": (Pictures, Images, 1),
}


def train(strategy: str, name: str, options: dict, **of_trainer) -> dict:
    """Return the losses of three epochs, and metrics and outputs of averaged weights."""
    torch.set_default_dtype(torch.float64)
    make, data, targets = MODELS[name]
    dataset = data()
    with Lab(strategy, device="cpu", timeout=60, **options) as lab:
        torch.manual_seed(3)
        model = make()
        start = {name: each.detach().clone() for name, each in model.named_parameters()}
        trainer = lab.trainer(
            model,
            tasks.Classification(),
            SGD,
            batch_size=8,
            example=dataset[0],
            targets=targets,
            max_grad_norm=0.5,
            ema=0.5,
            **of_trainer,
        )
        losses = []
        for epoch in range(3):
            losses += [trainer.step(*batch).item() for batch in trainer.batches(dataset, epoch)]
        metrics = trainer.evaluate(dataset)
        inputs, _ = next(iter(trainer.batches(dataset, 0, shuffle=False)))
        outputs = trainer.predict(inputs)
        outputs = outputs["logits"] if isinstance(outputs, dict) else outputs
        named = dict(trainer.strategy.module.named_parameters())
        return {
            "not moved": [name for name, each in named.items() if torch.equal(each, start[name])],
            "losses": losses,
            "metrics": metrics,
            "outputs": outputs.tolist(),
        }


QUICK = {
    ("tied", "accumulate"): {"schedule": "1f1b", "num_microbatches": 2},
    ("pictures", "gpipe"): {"schedule": "gpipe", "num_microbatches": 1},
}
FURTHER = {
    ("recurrent", "1f1b"): {"schedule": "1f1b", "num_microbatches": 2, "cut": ["layers.1"]},
    ("tied", "mesh"): {"schedule": "1f1b", "num_microbatches": 2, "pp": 2},
    ("deep", "interleaved"): {"schedule": "interleaved1f1b", "num_microbatches": 2},
    ("tied", "cut"): {"schedule": "gpipe", "num_microbatches": 2, "cut": ["layers.1"]},
    ("pictures", "mesh"): {"schedule": "gpipe", "num_microbatches": 1, "pp": 2},
    ("deep, tied", "mesh, interleaved"): {
        "schedule": "interleaved1f1b",
        "num_microbatches": 2,
        "pp": 2,
    },
}
REPEATED = {  # what other rows have, in another combination
    ("language", "gpipe"): {"schedule": "gpipe", "num_microbatches": 4},
    ("language", "accumulate"): {"schedule": "1f1b", "num_microbatches": 2},
    ("deep, tied", "interleaved"): {"schedule": "interleaved1f1b", "num_microbatches": 2},
}


def on_two(cases: dict) -> dict:
    return {
        (name, case): train(
            "mesh" if case.startswith("mesh") else "pipeline",
            name,
            options,
            **({"accumulate": 2} if case in ("accumulate", "mesh, interleaved") else {}),
        )
        for (name, case), options in cases.items()
    }


@once
def quick() -> list[dict]:
    return run_world(2, on_two, QUICK, timeout=300)


@once
def further() -> list[dict]:
    return run_world(2, on_two, FURTHER, timeout=300)


@once
def repeated() -> list[dict]:
    return run_world(2, on_two, REPEATED, timeout=300)


# Tracing takes seconds for each rank and model.
ON_FOUR = [("ddp_pipeline", "spare"), ("mesh", "tied")]
REPEATED_ON_FOUR = [
    *(("ddp_pipeline", name) for name in ("language", "tied")),
    *(("mesh", name) for name in ("language", "spare")),
]


def on_four(cases: list[tuple[str, str]]) -> dict:
    options = {"schedule": "gpipe", "num_microbatches": 2, "pp": 2}
    return {(strategy, name): train(strategy, name, options) for strategy, name in cases}


@once
def alone(name: str) -> dict:
    return run_world(1, train, "single", name, {})[0]


def assert_losses_same(trained: dict, expected: dict) -> None:
    assert trained["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    assert trained["metrics"] == pytest.approx(expected["metrics"], rel=1e-12)


def assert_same(trained: dict, expected: dict) -> None:
    assert_losses_same(trained, expected)
    for row, other in zip(trained["outputs"], expected["outputs"], strict=True):
        assert row == pytest.approx(other, rel=1e-11, abs=1e-13)


@pytest.mark.parametrize(("name", "case"), QUICK)
def test_traced_model_equals_single(name, case):
    for rank in quick():
        assert_same(rank[name, case], alone(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    extra((*FURTHER, *REPEATED)),
)
def test_traced_model_equals_single_in_further_cases(name, case):
    for rank in repeated() if (name, case) in REPEATED else further():
        assert_same(rank[name, case], alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("cases", [ON_FOUR, *extra([REPEATED_ON_FOUR])], ids=["usual", "repeated"])
def test_traced_model_on_two_pipelines_equals_single(cases):
    for number, rank in enumerate(run_world(4, on_four, cases, timeout=300)):
        for (strategy, name), trained in rank.items():
            assert_losses_same(trained, alone(name))  # a replica predicts its own samples
            # the ranks with the first stage have it, too
            has_spare = name == "spare" and number in ((0, 2) if strategy != "mesh" else (0, 1))
            expected = ["spare.weight", "spare.bias"] if has_spare else []
            assert trained["not moved"] == expected, (strategy, name, number)


SPLIT = {
    ("deep", "three devices"): {"devices": ["cpu"] * 3, "num_microbatches": 2},
    ("tied", "accumulate"): {"devices": ["cpu", "cpu"], "num_microbatches": 3},
    ("recurrent", "two devices"): {"devices": ["cpu", "cpu"], "num_microbatches": 2},
    ("pictures", "two devices"): {"devices": ["cpu", "cpu"], "num_microbatches": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("deep", "three devices"),
        ("tied", "accumulate"),
        ("recurrent", "two devices"),
        pytest.param("pictures", "two devices", marks=pytest.mark.extra),
    ],
)
def test_traced_model_on_several_devices_equals_single(name, case):
    accumulated = {"accumulate": 2} if case == "accumulate" else {}
    (trained,) = run_world(
        1, partial(train, "split", name, SPLIT[name, case], **accumulated), timeout=200
    )
    assert_same(trained, alone(name))


def in_bf16(strategy: str, options: dict) -> tuple[list[float], torch.Tensor]:
    """Return the losses of two epochs with mixed precision, and the outputs after them."""
    torch.set_default_dtype(torch.float32)
    dataset = Sentences()
    with Lab(strategy, device="cpu", timeout=60, precision="bf16", **options) as lab:
        torch.manual_seed(3)
        trainer = lab.trainer(
            Language(),
            tasks.Classification(),
            SGD,
            batch_size=8,
            example=dataset[0],
            targets="label",
        )
        losses = []
        for epoch in range(2):
            losses += [trainer.step(*batch).item() for batch in trainer.batches(dataset, epoch)]
        inputs, _ = next(iter(trainer.batches(dataset, 0, shuffle=False)))
        outputs = trainer.predict(inputs)
        return losses, outputs["logits"] if isinstance(outputs, dict) else outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "options"),
    [
        ("pipeline", 2, {"schedule": "1f1b", "num_microbatches": 2}),
        ("split", 1, {"devices": ["cpu", "cpu"], "num_microbatches": 2}),
    ],
)
def test_traced_stages_compute_in_bf16(strategy, ranks, options):
    expected, expected_outputs = run_world(1, in_bf16, "single", {})[0]
    assert expected_outputs.dtype is torch.bfloat16
    for losses, outputs in run_world(ranks, in_bf16, strategy, options, timeout=200):
        assert losses == pytest.approx(expected, rel=2e-3)
        assert outputs.dtype is torch.bfloat16
        assert torch.allclose(outputs.float(), expected_outputs.float(), atol=0.02)


class Branching(Language):
    def forward(self, input_ids, attention_mask):
        if input_ids.sum() > 0:
            input_ids = input_ids.flip(1)
        return super().forward(input_ids, attention_mask)


class Counting(Language):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, input_ids, attention_mask):
        self.steps += 1
        return super().forward(input_ids, attention_mask)


class Scalar(Language):
    def forward(self, input_ids, attention_mask):
        outputs = super().forward(input_ids, attention_mask)
        return outputs | {"mean": outputs["tokens"].mean()}


class Numbered(Language):
    def forward(self, input_ids, attention_mask):
        outputs = super().forward(input_ids, attention_mask)
        return outputs | {"samples": len(input_ids)}


class Normalising(Language):
    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WORDS)

    def forward(self, input_ids, attention_mask):
        outputs = super().forward(input_ids, attention_mask)
        return {"logits": self.batch_norm(outputs["logits"])}


def with_hook() -> nn.Module:
    model = Language()
    model.layers[1].register_forward_hook(lambda *_: None)
    return model


BRANCH = Branching.forward.__code__.co_firstlineno + 1  # the line of its condition
MISTAKES = {
    "no example": (Language, {}, "cuts the model by a trace, and needs a sample for it: lab.tr"),
    "branch": (Branching, {}, f" (test_traced.py, line {BRANCH}). A model that is no Chain is cut"),
    "one sample": (
        Normalising,
        {"num_microbatches": 8},
        ". BatchNorm cannot compute the variance of one value. Choose a batch_size",
    ),
    "Python state": (Counting, {}, "runs Python only once, but a forward pass changes steps. Keep"),
    "scalar": (Scalar, {}, "all outputs of the model must be [b, ...], with a row for each sample"),
    "number": (Numbered, {}, "with a row for each sample; got int for "),
    "hook": (with_hook, {}, "and the module layers.1 has one (register_forward_hook). Compute it"),
    "path": (Language, {"cut": ["layer.1"]}, "the model has no module layer.1. Use the path of"),
    "order": (
        Language,
        {"cut": ["layers.2", "layers.1"], "schedule": "interleaved1f1b"},
        "makes 3 stages, but",
    ),
    "list": (Language, {"cut": ["layers"]}, "a forward pass does not call layers exactly once"),
    "ranks": (partial(Language, layers=0), {"schedule": "interleaved1f1b"}, "into 4 stages: only"),
}


def refused() -> dict[str, str]:
    outcomes: dict[str, str] = {}
    dataset = Sentences()
    for case, (make, options, _) in MISTAKES.items():
        keys = {"schedule": "gpipe", "num_microbatches": 2} | options
        with Lab("pipeline", device="cpu", timeout=30, **keys) as lab:
            example = None if case == "no example" else dataset[0]
            try:
                lab.trainer(
                    make(), tasks.Classification(), SGD, 8, example=example, targets="label"
                )
                outcomes[case] = "trained"
            except ConfigError as error:
                outcomes[case] = str(error)
    return outcomes


@once
def messages() -> list[dict[str, str]]:
    return run_world(2, refused, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("case", MISTAKES)
def test_model_that_no_trace_can_cut_is_refused_with_the_reason(case):
    for rank in messages():
        assert MISTAKES[case][2] in rank[case]
        assert rank[case].startswith(("strategy", "the model cannot be cut"))
