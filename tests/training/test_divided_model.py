"""A model or a loss that computes something else of the parts of a batch is named in the log."""

from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from launches import SMALL, launch
from own_losses import Centred
from torch import nn

from ddp_lab.tasks.classification import Classification
from ddp_lab.training import divided_model
from ddp_lab.training.divided_loss import Division
from ddp_lab.training.divided_model import describe_batch_norm, describe_division

AS_BATCH_NORM = (
    "the outputs of a sample depend on the others of its batch, as with BatchNorm. With "
)


class Centring(nn.Linear):
    def forward(self, inputs):
        features = super().forward(inputs)
        return features - features.mean(0) if self.training else features


class Mixing(nn.Linear):
    """Manifold mixup (Verma et al. 2019, arXiv:1806.05236) with a fixed factor."""

    def forward(self, inputs):
        features = super().forward(inputs)
        return 0.7 * features + 0.3 * features.flip(0)


class Balancing(nn.Linear):
    """Two experts, with a loss of their balance as an output that is no row for each sample."""

    def forward(self, inputs):
        logits = super().forward(inputs)
        fractions = logits.softmax(1).mean(0)
        return {"logits": logits, "balance": fractions.square().sum()}


class Summing(nn.Linear):
    def forward(self, inputs):
        logits = super().forward(inputs)
        return {"logits": logits, "penalty": logits.square().mean(), "weight": self.weight.sum()}


class Random(nn.Linear):
    """A mean of what dropout leaves, as models return that compute their loss themselves."""

    def forward(self, inputs):
        logits = torch.dropout(super().forward(inputs), 0.5, self.training)
        return {"logits": logits, "loss": logits.square().mean()}


class Queue(nn.Linear):
    """Keeps the last features, as MoCo does (He et al. 2019, arXiv:1911.05722)."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("queue", torch.zeros(4, sizes[1]))

    def forward(self, inputs):
        features = super().forward(inputs)
        with torch.no_grad():
            self.queue.copy_(torch.cat([features, self.queue])[:4])
        return features


class Counting(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs):
        self.passes += 1
        return super().forward(inputs)


class Noisy(nn.Linear):
    """Random numbers of three generators, always the same ones in a trial."""

    def forward(self, inputs):
        noise = torch.from_numpy(np.random.rand(*inputs.shape)).float()
        return super().forward(inputs + torch.rand_like(inputs) + noise)


class Sequence(nn.Module):
    """Attention over the samples, because its layer has the batch in the second dimension."""

    def __init__(self, batch_first):
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        self.head = nn.Linear(8, 10)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens)).mean(1))


class Recurrent(nn.LSTM):
    """Returns states of its two layers, [2, b, 4], with the samples in the second dimension."""

    def __init__(self):
        super().__init__(6, 4, num_layers=2, batch_first=True)
        self.head = nn.Linear(4, 10)

    def forward(self, inputs):
        outputs, (hidden, _) = super().forward(inputs[:, None])
        return {"logits": self.head(outputs[:, 0]), "hidden": hidden}


def of(kind):
    return lambda: kind(6, 10)


def normalised():
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Dropout(0.5))


CASES = {
    "plain": (of(nn.Linear), ""),
    "centring": (of(Centring), AS_BATCH_NORM),
    "mixing": (of(Mixing), AS_BATCH_NORM),
    "balancing": (of(Balancing), "an output that has no row for each sample is neither a sum nor"),
    "a mean of random numbers": (of(Random), ""),
    "a mean over samples": (of(Summing), ""),
    "queue": (of(Queue), "the buffer queue of the model is computed from the batch. With "),
    "counter": (of(Counting), ""),
    "random numbers": (of(Noisy), ""),
    "BatchNorm, dropout": (normalised, ""),
    "states of layers": (Recurrent, ""),
    "attention over samples": (lambda: Sequence(batch_first=False), AS_BATCH_NORM),
    "attention": (lambda: Sequence(batch_first=True), ""),
}


def divide(model, task, inputs, **parts) -> list[str]:
    strategy = MagicMock(**{"replicas": 1, "num_microbatches": 1} | parts)
    strategy.name = "some"
    targets = torch.tensor([1, 2])
    return describe_division(Division(strategy, 8, 1), model, task, lambda: (inputs, targets))


@pytest.mark.parametrize("case", CASES)
def test_log_names_what_depends_on_other_samples(case):
    make, expected = CASES[case]
    torch.manual_seed(0)
    model = make()
    tokens = torch.arange(7).repeat(2, 1)  # of an example twice: two equal samples
    inputs = tokens if isinstance(model, Sequence) else torch.rand(2, 6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    lines = divide(model, Classification(), inputs, replicas=2)
    assert [line.startswith(expected) for line in lines] == [True] * bool(expected), lines
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(random_state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({}, None),
        ({"replicas": 3}, "With strategy=some on 3 replicas the losses differ"),
        ({"num_microbatches": 4}, "With strategy.num_microbatches=4 the losses differ"),
    ],
)
def test_line_names_what_divides_the_batch(parts, named):
    lines = divide(Centring(6, 10), Classification(), torch.rand(2, 6), **parts)
    assert bool(lines) == (named is not None)
    assert all(named in line for line in lines)


@pytest.mark.parametrize(
    ("parts", "accumulate", "excerpt"),
    [
        ({}, 1, None),
        ({"replicas": 2}, 1, "at most 12 samples of a global batch of 24 together, because of"),
        ({"replicas": 2, "batch_norm": "sync"}, 1, None),
        ({"replicas": 2}, 2, "6 samples of a global batch of 24 together, because of strategy="),
        ({"replicas": 2, "batch_norm": "sync"}, 2, "12 samples of a global batch of 24 together"),
        ({"num_microbatches": 5}, 1, "5 samples of a global batch of 24 together"),
    ],
)
def test_log_says_which_samples_batch_norm_normalises_together(parts, accumulate, excerpt):
    defaults = {"replicas": 1, "num_microbatches": 1, "batch_norm": "local"}
    strategy = MagicMock(**defaults | parts)
    strategy.name = "some"
    division = Division(strategy, 24, accumulate)
    assert describe_batch_norm(division, nn.Linear(6, 10)) == []
    lines = describe_batch_norm(division, normalised())
    assert [excerpt in line for line in lines] == [True] * (excerpt is not None), lines


class Counted(nn.Module):
    """A loss that counts its calls, which are as many on each of several ranks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, logits, targets):
        self.calls += 1
        return F.cross_entropy(logits, targets, reduction="none")


@pytest.mark.parametrize(
    ("make", "parts", "expected"),
    [
        (Centred, {"replicas": 2}, "the buffer loss.centre of the loss is computed from the batch"),
        (Counted, {"replicas": 2}, None),
        (
            Counted,
            {"num_microbatches": 2},
            "the buffer loss.calls of the loss changes with each of its calls",
        ),
    ],
)
def test_log_names_a_loss_with_a_state_of_the_batch(make, parts, expected):
    task = Classification(make())
    before = {name: buffer.clone() for name, buffer in task.named_buffers()}
    lines = divide(nn.Linear(6, 10), task, torch.rand(2, 6), **parts)
    expected_lines = [] if expected is None else [f"{expected}. With strategy"]
    assert [line[: len(each)] for line, each in zip(lines, expected_lines, strict=True)] == (
        expected_lines
    )
    for name, buffer in task.named_buffers():
        assert torch.equal(before[name], buffer), "the trial changes the loss"


def test_failing_loss_hides_nothing_of_the_model():
    task = Classification(lambda logits, targets: 1 / 0)
    task.register_buffer("other", torch.zeros(()))
    lines = divide(Centring(6, 10), task, torch.rand(2, 6), replicas=2)
    assert [line.startswith(AS_BATCH_NORM) for line in lines] == [True]


@pytest.mark.parametrize(("flops", "bytes_of_weights"), [(100, 2**30), (3e10, 100)])
def test_expensive_models_are_not_tried(flops, bytes_of_weights, monkeypatch):
    monkeypatch.setattr(divided_model, "SMALL", 5)  # elements of a sample
    monkeypatch.setattr(divided_model, "MOST_FLOPS", flops)
    monkeypatch.setattr(divided_model, "MOST_BYTES", bytes_of_weights)
    monkeypatch.setattr(divided_model, "pass_of", None)
    assert divide(Centring(6, 10), Classification(), torch.rand(2, 6), replicas=2) == []
    assert not divided_model.is_cheap(Centring(6, 10), torch.rand(2, 6))


@pytest.mark.slow
def test_command_line_names_a_loss_with_a_state(tmp_path):
    line = "ddp-lab train strategy=single accumulate=2"
    loss = ["loss=own", "loss._target_=own_losses.Centred"]
    code, output = launch(line, *SMALL, *loss, "epochs=1", f"runs_dir={tmp_path}")
    assert code == 0, output
    assert output.count("the buffer loss.centre of the loss is computed from the batch") == 1
    assert "With accumulate=2 the losses differ from those of one device" in output
