"""Models with complex parameters and outputs: clipping, averages and losses."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.checkpoints.state import gather_full_state
from ddp_lab.models.chain import Chain

STRATEGIES = {
    "ddp": {},
    "scratch": {},
    "fsdp": {},
    "tp": {"tp": None},
    "pipeline": {"num_microbatches": 1, "schedule": "gpipe"},
    "mesh": {"shard": None},
}
SGD = partial(torch.optim.SGD, lr=0.05)
DECAY = 0.8


class Waves(nn.Module):
    """A layer with a complex weight, whose parts differ."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))

    def forward(self, x):
        return torch.fft.ifft(torch.fft.fft(x) @ self.weight).real.tanh()


class Parts(nn.Module):
    """Complex outputs, whose imaginary part has parameters of its own."""

    def __init__(self):
        super().__init__()
        self.real = nn.Linear(4, 4)
        self.imaginary = nn.Linear(4, 4)

    def forward(self, x):
        return torch.complex(self.real(x), self.imaginary(x))


def chain() -> nn.Module:
    return Chain((4,), first=nn.Linear(4, 4), waves=Waves(), last=nn.Linear(4, 4))


def distance(outputs, targets):
    return (outputs - targets).abs().mean(1)


def train(strategy: str, model=chain, loss=None, strategy_options=None, **options):
    """Return the losses, the weights after each step, and the averages at the end."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Lab(strategy, device="cpu", timeout=20, seed=0, **(strategy_options or {})) as lab:
            generator = torch.Generator().manual_seed(2)
            samples = TensorDataset(*torch.rand(2, 8, 4, generator=generator))
            trainer = lab.trainer(
                model(),
                loss or tasks.Regression(),
                SGD,
                batch_size=4,
                example=samples[0],
                **options,
            )
            weights = [full_weights(trainer)]
            losses = []
            for epoch in range(2):
                for batch in trainer.batches(samples, epoch):
                    losses.append(trainer.step(*batch).item())
                    weights.append(full_weights(trainer))
            return losses, weights
    finally:
        torch.set_default_dtype(before)


def full_weights(trainer) -> dict[str, torch.Tensor]:
    weights, _ = gather_full_state(trainer.strategy, trainer.state.weights())
    return weights


CASES = {
    "clipped": {"max_grad_norm": 0.1},
    "averaged": {"ema": DECAY, "ema_warmup": False},
    "warmed up": {"ema": DECAY},
}
PARTS = {"model": Parts, "loss": distance}


def on_two() -> dict:
    return {
        (strategy, case): train(strategy, strategy_options=of_strategy, **options)
        for strategy, of_strategy in STRATEGIES.items()
        for case, options in CASES.items()
    }


@once
def two() -> list[dict]:
    return run_world(2, on_two, timeout=200)


def losses_of_parts() -> list[float]:
    losses, _ = train("ddp", **PARTS)
    return losses


@once
def alone(case: str):
    return train("single", **CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_norm_of_complex_gradients_counts_both_parts(strategy):
    losses, _ = alone("clipped")
    for rank in two():
        losses_of_rank, _ = rank[strategy, "clipped"]
        assert losses_of_rank == pytest.approx(losses, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["averaged", "warmed up"])
@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_complex_weights_are_averaged(strategy, case):
    _, weights = alone(case) if strategy == "single" else two()[0][strategy, case]
    average = weights[0]["model.waves.weight"]
    for step, after in enumerate(weights[1:]):
        decay = min(DECAY, (1 + step) / (10 + step)) if case == "warmed up" else DECAY
        average = decay * average + (1 - decay) * after["model.waves.weight"]
    saved = weights[-1]["ema.waves.weight"]
    assert torch.allclose(saved, average, rtol=0, atol=1e-12)
    assert not torch.allclose(saved.imag, weights[-1]["model.waves.weight"].imag, atol=1e-6)


@pytest.mark.slow
def test_complex_outputs_are_trained_under_ddp():
    losses, _ = train("single", **PARTS)
    for losses_of_rank in run_world(2, losses_of_parts, timeout=200):
        assert losses_of_rank == pytest.approx(losses, rel=1e-10)
