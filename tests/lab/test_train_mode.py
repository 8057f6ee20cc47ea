"""A loop calls the model's `train` as `fit` does: at its beginning and after an evaluation."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_lab import Lab, tasks

EPOCHS = 2


class Frozen(nn.Module):
    """A head on a backbone that stays in evaluation mode. It keeps the modes that it is given.

    Args:
        hides: whether its own `training` stays False.
    """

    def __init__(self, hides: bool = False):
        super().__init__()
        self.backbone = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)
        self.hides = hides
        self.modes: list[bool] = []

    def train(self, mode: bool = True):
        super().train(mode)
        self.backbone.eval()
        self.modes.append(mode)
        if self.hides:
            self.training = False
        return self

    def forward(self, inputs):
        return self.head(self.backbone(inputs))


def data() -> TensorDataset:
    return TensorDataset(
        torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.ones(20, 1)
    )


def trained(how: str, hides: bool, strategy: str = "single") -> Frozen:
    model = Frozen(hides)
    with Lab(strategy, device="cpu") as lab:
        trainer = lab.trainer(
            model, tasks.Regression(), partial(torch.optim.SGD, lr=0.1), batch_size=8
        )
        model.modes.clear()  # those of the construction
        if how == "fit":
            trainer.fit(data(), data(), epochs=EPOCHS)
            return model
        for epoch in range(EPOCHS):
            for inputs, targets in trainer.batches(data(), epoch):
                trainer.step(inputs, targets)
            trainer.evaluate(data())
    return model


@pytest.mark.parametrize("hides", [False, True], ids=["shown", "hidden"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "scratch"])
def test_loop_switches_the_model_as_often_as_fit(strategy, hides):
    loop, fit = (trained(how, hides, strategy) for how in ("loop", "fit"))
    assert loop.modes == fit.modes == [True, False] * EPOCHS


def test_backbone_that_train_keeps_in_evaluation_mode_counts_no_batch():
    """Its `training` is True from the construction on, but `train` has not been called then."""
    for how in ("loop", "fit"):
        backbone = trained(how, hides=False).backbone
        assert backbone.num_batches_tracked == 0
        assert backbone.running_mean.eq(0).all()


def test_step_trains_a_model_that_the_user_has_switched_to_evaluation():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with Lab(device="cpu") as lab:
        trainer = lab.trainer(
            model, tasks.Regression(), partial(torch.optim.SGD, lr=0.1), batch_size=8
        )
        for inputs, targets in trainer.batches(data(), 0):
            model.eval()
            trainer.step(inputs, targets)
            trainer.predict(inputs)
    assert model[1].num_batches_tracked == 3
