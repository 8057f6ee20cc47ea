"""Models that are no Chain under pipelines, which cut them by a trace: equal to one device."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from worlds import once, run_world

from ddp_lab import Lab, tasks

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
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

    def __init__(self, is_tied: bool = False, layers: int = 4, width: int = 8):
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
        found = first
        for block in self.blocks:
            found = block(found.clone())
        return self.head((found + first).mean((2, 3)))


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
    "tied": (partial(Language, is_tied=True), Sentences, "label"),
    "pictures": (Pictures, Images, 1),
}
PIPELINES = {
    "gpipe": ("pipeline", {"schedule": "gpipe", "num_microbatches": 2}),
    "1f1b": ("pipeline", {"schedule": "1f1b", "num_microbatches": 2}),
    "interleaved": ("pipeline", {"schedule": "interleaved1f1b", "num_microbatches": 2}),
}


def train(strategy: str, name: str, options: dict, **of_trainer) -> dict:
    """Return losses, metrics, outputs, weights and their averages of three epochs."""
    torch.set_default_dtype(torch.float64)
    make, data, targets = MODELS[name]
    dataset = data()
    with Lab(strategy, device="cpu", timeout=60, **options) as lab:
        torch.manual_seed(3)
        trainer = lab.trainer(
            make(),
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
        weights = lab.full_weights(trainer) if hasattr(lab, "full_weights") else {}
        return {
            "losses": losses,
            "metrics": metrics,
            "outputs": outputs.tolist(),
            "weights": weights,
        }


def on_two() -> dict:
    found: dict = {}
    for name in MODELS:
        for case, (strategy, options) in PIPELINES.items():
            if name == "pictures":
                options = options | {"num_microbatches": 1, "schedule": "gpipe"}
            found[name, case] = train(strategy, name, options)
        if name != "pictures":
            options = {"schedule": "gpipe", "num_microbatches": 2}
            found[name, "accumulate"] = train("pipeline", name, options, accumulate=2)
    return found


@once
def two() -> list[dict]:
    return run_world(2, on_two, timeout=300)


@once
def alone(name: str) -> dict:
    return train("single", name, {})


CASES = [(name, case) for name in MODELS for case in PIPELINES]
CASES += [(name, "accumulate") for name in ("language", "tied")]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_traced_model_equals_single(name, case):
    expected = alone(name)
    for rank in two():
        found = rank[name, case]
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-12)
        for row, other in zip(found["outputs"], expected["outputs"], strict=True):
            assert row == pytest.approx(other, rel=1e-11, abs=1e-13)
