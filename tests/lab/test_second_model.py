"""Models that a Lab constructs one after the other, as a search over widths does."""

from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset
from worlds import run_world

from ddp_lab import Lab, tasks

DATA = TensorDataset(torch.ones(8, 4), torch.ones(8, 2))
SGD = partial(torch.optim.SGD, lr=0.1)


def second_weights() -> list[list[float]]:
    """Return the weights of models that are constructed after a step, and after `fit`."""
    with Lab("ddp", device="cpu") as lab:
        weights: list[list[float]] = []
        for use in ("step", "fit", ""):
            model = nn.Linear(4, 2)
            weights.append(model.weight.flatten().tolist())
            trainer = lab.trainer(model, tasks.Regression(), SGD, batch_size=4, example=DATA[0])
            if use == "step":
                trainer.step(*next(trainer.batches(DATA, 0)))
            elif use == "fit":
                trainer.fit(DATA, DATA, epochs=1)
        return weights


def test_model_made_after_training_is_the_same_on_every_rank():
    first, second = run_world(2, second_weights)
    assert first == second
    assert len({tuple(weights) for weights in first}) == len(first)
