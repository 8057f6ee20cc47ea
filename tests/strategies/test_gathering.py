"""Losses that compare the samples of the GLOBAL batch, by ddp_lab.gather.

In float64, so that any strategy on any number of ranks has the weights of single within 1e-12, and
single those of a loop of plain torch. Of the last batch two of three ranks have no sample.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replicating import REPLICATING
from torch import nn
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, gather, own_rows, tasks
from ddp_lab.config.errors import ConfigError
from ddp_lab.tasks.base import measure

SIZE = 25
BATCH = 12
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
WORLDS = [("dp", 1, {}), ("tp", 2, {"tp": 2}), *REPLICATING]
FAST = [("dp", 1, {}), ("scratch", 3, {"algorithm": "bucketed"}), ("ddp", 3, {})]


def pairs() -> TensorDataset:
    """Two views of each sample, [6] each, and a target that says how much the sample counts."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.rand(SIZE, 6, generator=generator, dtype=torch.float64),
        torch.rand(SIZE, 6, generator=generator, dtype=torch.float64),
        torch.rand(SIZE, generator=generator, dtype=torch.float64),
    )


class TwoViews(nn.Module):
    """Returns the embeddings of two views, as a dict."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def forward(self, first, second):
        return {"first": self.encoder(first), "second": self.encoder(second)}


def info_nce(outputs, targets):
    """Contrast each first view with the second views of the GLOBAL batch."""
    others = gather(outputs["second"])
    similarities = outputs["first"] @ others.T
    return F.cross_entropy(similarities, own_rows(), reduction="none"), targets


class OneTensor(nn.Sequential):
    """Embeddings of [b, 6]: a model that every strategy can cut or divide."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.double()


def contrast(outputs, targets):
    """As `info_nce`, of one tensor [b, 4]: two views, [b, 2] each."""
    first, second = outputs.chunk(2, 1)
    similarities = first @ gather(second).T
    return F.cross_entropy(similarities, own_rows(), reduction="none")


def train(strategy: str, options: dict[str, Any], nested: bool, **more: Any):
    """Return weights and losses after two epochs, and an evaluation."""
    dataset = pairs()
    model = TwoViews() if nested else OneTensor()
    if not nested:
        dataset = TensorDataset(dataset.tensors[0], dataset.tensors[2])
    # Without an example the first batch shows that the loss gathers.
    example = dataset[0] if nested or strategy in ("mesh", "split") else None
    torch.set_default_dtype(torch.float64)
    try:
        with Lab(strategy, device="cpu", timeout=60, **options) as lab:
            trainer = lab.trainer(
                model,
                info_nce if nested else contrast,
                SGD,
                BATCH,
                max_grad_norm=1.0,
                example=example,
                targets=2 if nested else 1,
                **more,
            )
            losses = [
                float(trainer.step(*batch))
                for epoch in range(2)
                for batch in trainer.batches(dataset, epoch)
            ]
            evaluation = trainer.evaluate(dataset)["loss"]
            weights = full_weights(trainer)
    finally:
        torch.set_default_dtype(torch.float32)
    return weights, losses, evaluation


def full_weights(trainer) -> dict[str, torch.Tensor]:
    from ddp_lab.checkpoints.state import gather_full_state

    full, _ = gather_full_state(trainer.strategy, trainer.state.weights())
    return {name: tensor.clone() for name, tensor in (full or {}).items()}


@once
def expected(nested: bool):
    return train("single", {}, nested)


@pytest.mark.parametrize(
    ("strategy", "ranks", "options", "nested"),
    [
        pytest.param(*world, nested, marks=() if world in FAST else pytest.mark.slow)
        for world in [*WORLDS, ("mesh", 2, {"shard": 1})]
        for nested in (False, True)[: 1 if world[0] == "mesh" else 2]
    ],
    ids=lambda value: str(value).strip("{}"),
)
def test_loss_over_the_global_batch_equals_single(strategy, ranks, options, nested):
    weights, losses, evaluation = expected(nested)
    results = run_world(ranks, train, strategy, options, nested, timeout=100)
    own_weights, *_ = results[0]
    assert own_weights.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(own_weights[name], tensor, rtol=0, atol=1e-12)
    for _, own_losses, own_evaluation in results:
        torch.testing.assert_close(own_losses, losses, rtol=0, atol=1e-12)
        assert own_evaluation == pytest.approx(evaluation, abs=1e-12)


def test_single_equals_a_loop_of_plain_torch():
    weights, losses, _ = expected(False)
    dataset = pairs().tensors[0]
    model = OneTensor()
    optimizer = SGD(model.parameters())
    own_losses = []
    with Lab() as lab:
        order = lab.trainer(OneTensor(), tasks.Regression(), SGD, BATCH)
        indices = TensorDataset(torch.arange(SIZE), torch.zeros(SIZE))
        batches = [inputs for epoch in range(2) for inputs, _ in order.batches(indices, epoch)]
    for indices in batches:
        first, second = model(dataset[indices]).chunk(2, 1)
        loss = F.cross_entropy(first @ second.T, torch.arange(len(indices)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        own_losses.append(loss.item())
    assert own_losses == pytest.approx(losses, abs=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[f"model.{name}"], parameter.data, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "options", "more", "key"),
    [
        ("single", {}, {"accumulate": 2}, "accumulate=2"),
        ("split", {"devices": ["cpu", "cpu"], "num_microbatches": 2}, {}, "num_microbatches=2"),
    ],
)
def test_gather_refuses_micro_batches(strategy, options, more, key):
    with pytest.raises(ConfigError, match=f"{key}: is not supported by a loss that calls"):
        train(strategy, options, nested=False, **more)


def test_gather_outside_of_a_batch_is_refused():
    with Lab(), pytest.raises(ConfigError, match="there is no such batch here"):
        gather(torch.zeros(2))


def other_rows(outputs, targets):
    return gather(outputs[:1]).sum().expand(len(outputs))


def test_gather_of_other_rows_is_refused():
    with Lab(device="cpu") as lab:
        trainer = lab.trainer(OneTensor(), other_rows, SGD, BATCH)
        batch = next(trainer.batches(TensorDataset(pairs().tensors[0], pairs().tensors[2]), 0))
        with pytest.raises(ConfigError, match=r"gather: got 1 row on rank 0, expected 12"):
            trainer.step(*batch)


def short_batch() -> str:
    dataset = TensorDataset(pairs().tensors[0][:2], pairs().tensors[2][:2])
    with Lab("ddp", device="cpu", timeout=5) as lab:
        trainer = lab.trainer(OneTensor(), contrast, SGD, BATCH)
        trainer.fit(dataset, None, epochs=1)
    return "trained"


def test_first_batch_without_a_sample_on_some_ranks_is_refused():
    with pytest.raises(AssertionError, match="the first batch has 2 samples for 3 ranks"):
        run_world(3, short_batch, timeout=60)


def losses_of(is_compiled: bool) -> list[float]:
    dataset = TensorDataset(pairs().tensors[0], pairs().tensors[2])
    with Lab("ddp", device="cpu", timeout=120) as lab:
        trainer = lab.trainer(OneTensor(), contrast, SGD, BATCH, example=dataset[0])
        if is_compiled:
            trainer.strategy.measure = torch.compile(measure, dynamic=False)
        return [
            float(trainer.step(*batch))
            for epoch in range(2)
            for batch in trainer.batches(dataset, epoch)
        ]


@pytest.mark.slow
def test_compiled_loss_gathers():
    expected_losses, _ = run_world(2, losses_of, False, timeout=60)
    for losses in run_world(2, losses_of, True, timeout=300):
        assert losses == pytest.approx(expected_losses, abs=1e-12)
