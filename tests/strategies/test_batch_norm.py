"""Which BatchNorm layers can be synchronised. Their results are in the matrix (test_equivalence.py)."""

import pytest
import torch
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.strategies.batch_norm import SyncBatchNorm, set_batch_norm


class OwnBatchNorm(nn.BatchNorm2d):
    pass


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(3, affine=False),
        nn.BatchNorm2d(3, momentum=None),
        nn.BatchNorm2d(3, track_running_stats=False),
        OwnBatchNorm(3),
    ],
    ids=["affine", "momentum", "statistics", "own"],
)
def test_layers_that_cannot_be_synchronised_are_refused(layer):
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Sequential(layer))
    with pytest.raises(ConfigError, match=r"strategy\.batch_norm=sync: does not support the layer 1\.0, .*BatchNorm"):
        set_batch_norm(model, "sync")
    assert set_batch_norm(model, "local") is model


def test_every_name_of_a_layer_is_synchronised_and_its_hooks_stay():
    layer, called = nn.BatchNorm2d(3), []
    layer.register_forward_hook(lambda *_: called.append(True))
    model = nn.Sequential(layer, nn.ReLU(), layer).eval()
    for _ in range(2):  # a model may be set up again
        assert set_batch_norm(model, "sync") is model
    assert type(model[0]) is SyncBatchNorm
    assert model[0] is model[2] is layer
    model(torch.ones(2, 3, 4, 4))
    assert called == [True, True]
