"""An evaluation computes no more samples at once than a micro-batch of training has."""

import pytest
import torch
from launches import main_in_world
from torch import nn
from torch.utils.data import TensorDataset
from worlds import run_world

from ddp_lab import Lab
from ddp_lab.data.batch import size_of_evaluated

MICRO = 8  # samples


class Limited(nn.Module):
    """A linear model that has memory for a micro-batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert len(images) <= MICRO, f"{len(images)} samples do not fit"
        return self.linear(images.flatten(1))


def train(world_size: int, folder: str) -> None:
    main_in_world(
        f"strategy={'single' if world_size == 1 else 'ddp'}",
        "model=own",
        "model._target_=test_evaluation_batches.Limited",
        "data.val_fraction=0.1",
        "batch_size=60",
        f"accumulate={8 // world_size}",
        "epochs=1",
        "device=cpu",
        "tracker=none",
        f"runs_dir={folder}",
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_run_evaluates_in_micro_batches(world_size, tmp_path):
    run_world(world_size, train, world_size, str(tmp_path), timeout=90)
    (run,) = tmp_path.iterdir()
    assert '"test_loss"' in (run / "metrics.jsonl").read_text()


def test_trainer_evaluates_in_micro_batches():
    samples = torch.rand(50, 1, 28, 28)
    dataset = TensorDataset(samples, torch.zeros(50, dtype=torch.int64))
    with Lab("single", device="cpu") as lab:
        trainer = lab.trainer(
            Limited(),
            nn.CrossEntropyLoss(reduction="none"),
            torch.optim.SGD,
            batch_size=60,
            accumulate=8,
        )
        assert set(trainer.evaluate(dataset)) == {"loss"}


@pytest.mark.parametrize(
    ("sizes", "expected"), [((64, 1, 1), 64), ((60, 2, 4), 16), ((64, 4, 100), 4)]
)
def test_size_is_that_of_a_micro_batch_on_each_replica(sizes, expected):
    assert size_of_evaluated(*sizes) == expected
