"""Parameters that the optimizer leaves out, with clipping: as in a plain loop of torch."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.models.chain import Chain

BATCH = 8
STEPS = 6
LIMIT = 0.3
TWO = {
    "ddp": {},
    "ddp with the key": {"find_unused_parameters": True},
    "scratch": {},
    "scratch bucketed": {"algorithm": "bucketed"},
    "fsdp": {},
    "tp": {},
    "pipeline": {"num_microbatches": 2},
    "mesh": {"shard": None},
    "mesh stages": {"pp": 2, "num_microbatches": 2},
}
ONE = {"single": {}, "dp": {}, "split": {"devices": ["cpu", "cpu"]}}


def model() -> nn.Module:
    """Return a model with a frozen bias."""
    chain = Chain((6,), first=nn.Linear(6, 8), middle=nn.Linear(8, 8), last=nn.Linear(8, 4))
    chain.get_parameter("middle.bias").requires_grad_(False)
    return chain


def of_matrices(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in parameters if each.dim() > 1], lr=0.1)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.rand(BATCH * STEPS, 6, generator=generator, dtype=torch.float64)
    targets = torch.rand(BATCH * STEPS, 4, generator=generator, dtype=torch.float64)
    return inputs, targets


def train(strategy: str, accumulate: int = 1, **options) -> list[float]:
    """Return the losses of an epoch. After three steps the frozen bias is not frozen any more."""
    torch.set_default_dtype(torch.float64)
    try:
        with Lab(strategy, device="cpu", timeout=20, **options) as lab:
            samples = TensorDataset(*data())
            trainer = lab.trainer(
                model(),
                tasks.Regression(),
                of_matrices,
                batch_size=BATCH,
                accumulate=accumulate,
                max_grad_norm=LIMIT,
                example=samples[0],
            )
            losses: list[float] = []
            for batch in trainer.batches(samples, 0, shuffle=False):
                losses.append(trainer.step(*batch).item())
                if len(losses) == STEPS // 2:
                    trainer.strategy.module.requires_grad_(True)
            return losses
    finally:
        torch.set_default_dtype(torch.float32)


@once
def plain() -> list[float]:
    """Return the losses of a loop of torch."""
    torch.set_default_dtype(torch.float64)
    try:
        with Lab(device="cpu"):
            trained = model()
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer = of_matrices(trained.parameters())
    losses: list[float] = []
    for inputs, targets in zip(*(tensor.split(BATCH) for tensor in data()), strict=True):
        trained.zero_grad()
        loss = nn.functional.mse_loss(trained(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained.parameters(), LIMIT)
        assert norm > LIMIT, "nothing would be clipped"
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == STEPS // 2:
            trained.requires_grad_(True)
    return losses


def on_two() -> dict:
    results: dict = {name: train(name.split()[0], **options) for name, options in TWO.items()}
    return results | {"ddp in parts": train("ddp", 2), "scratch in parts": train("scratch", 2)}


@once
def two() -> list[dict]:
    return run_world(2, on_two, timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*TWO, "ddp in parts", "scratch in parts"])
def test_left_out_parameters_count_in_the_norm_as_in_a_plain_loop_on_two_ranks(strategy):
    for rank in two():
        assert rank[strategy] == pytest.approx(plain(), rel=1e-10)


@pytest.mark.parametrize("strategy", ONE)
def test_left_out_parameters_count_in_the_norm_as_in_a_plain_loop(strategy):
    assert train(strategy, **ONE[strategy]) == pytest.approx(plain(), rel=1e-10)
    assert train(strategy, 2, **ONE[strategy]) == pytest.approx(plain(), rel=1e-10)
