"""Losses of models in float64 are computed in float64, under every strategy."""

from functools import partial

import pytest
import torch
from torch.utils.data import TensorDataset
from worlds import run_world

from ddp_lab import Lab, tasks
from ddp_lab.models.gpt import gpt

VOCABULARY = 17
CONTEXT = 8
SAMPLES = {
    "Classification": (tasks.Classification(), (6, 5), torch.arange(6) % 5),
    "Segmentation": (tasks.Segmentation(), (6, 5, 2, 2), torch.arange(24).view(6, 2, 2) % 5),
    "Tokens": (tasks.Tokens(), (6, 4, 5), torch.arange(24).view(6, 4) % 5),
    "MultiLabel": (tasks.MultiLabel(), (6, 5), (torch.arange(30).view(6, 5) % 2).double()),
    "Regression": (tasks.Regression(), (6, 5), torch.arange(30, dtype=torch.float64).view(6, 5)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_losses_of_float64_outputs_are_not_rounded(name):
    task, shape, targets = SAMPLES[name]
    outputs = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole, weight = task.loss_sum(outputs, targets)
    parts = [task.loss_sum(outputs[row : row + 1], targets[row : row + 1])[0] for row in range(6)]
    assert whole.dtype == torch.float64
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-14)
    changed, _ = task.loss_sum(outputs + 1e-11 * torch.arange(outputs.numel()).view(shape), targets)
    assert 0 < abs(changed - whole) / weight < 1e-6, (
        "a small change of the outputs is lost in rounding"
    )


def losses(strategy: str, options: dict) -> list[float]:
    torch.set_default_dtype(torch.float64)
    tokens = torch.randint(
        0, VOCABULARY, (48, CONTEXT + 1), generator=torch.Generator().manual_seed(1)
    )
    data = TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())
    with Lab(strategy, device="cpu", timeout=30, **options) as lab:
        model = gpt(VOCABULARY, CONTEXT, depth=4, width=16, heads=2)
        make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        trainer = lab.trainer(model, tasks.Tokens(), make, batch_size=16, example=data[0])
        return [trainer.step(*batch).item() for batch in trainer.batches(data, 0)]


def test_gpt_in_float64_has_the_losses_of_single_in_a_pipeline():
    expected = run_world(1, losses, "single", {})[0]
    for losses_of_rank in run_world(2, losses, "pipeline", {"num_microbatches": 4}, timeout=60):
        assert losses_of_rank == pytest.approx(expected, rel=1e-13)
