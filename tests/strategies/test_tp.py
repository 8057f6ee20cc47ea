"""What tensor parallelism shards of a model, and what it keeps complete on every rank."""

from functools import partial

import own_models
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchvision.models import efficientnet_b0
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.checkpoints.state import gather_full_state
from ddp_lab.config.errors import TrainingError
from ddp_lab.strategies.sharded_layers import can_be_sharded

SHAPE = {"in_channels": 1, "image_size": 4, "num_classes": 4}
SGD = partial(torch.optim.SGD, lr=0.1)
SHARDED = {
    "Plain": ({"entry", "blocks.0.inner", "blocks.1.inner", "head"}, []),
    "InPlace": ({"conv", "squeeze", "hidden", "head"}, []),
    "DirectWeights": ({"entry", "usual", "head"}, ["inner", "back"]),
}


class ByKeyword(nn.Module):
    """Linear layers that get their input by its name."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(6, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        return self.head(input=self.hidden(input=inputs).relu())


def layers() -> dict:
    """Return the sharded and the replicated layers of each model, or what is said without any."""
    results: dict = {}
    images = torch.rand(4, 1, 4, 4)
    labels = torch.tensor([0, 1, 2, 3])
    with Lab("tp", device="cpu", timeout=30) as lab:
        for name in SHARDED:
            model = getattr(own_models, name)(**SHAPE)
            trainer = lab.trainer(
                model, tasks.Classification(), SGD, batch_size=4, example=images[0]
            )
            results[name] = set(trainer.strategy.layers), trainer.strategy.replicated
            assert trainer.step(images, labels).isfinite()
        model = own_models.DirectWeights(**SHAPE)
        trainer = lab.trainer(model, tasks.Classification(), SGD, batch_size=4)
        for name, use in (
            ("step", lambda: trainer.step(images, labels)),
            ("predict", lambda: trainer.predict(images)),
        ):
            with pytest.raises(TrainingError) as error:
                use()
            results[name] = str(error.value)
    return results


@once
def ranks() -> list[dict]:
    return run_world(2, layers)


@pytest.mark.parametrize("name", SHARDED)
def test_layers_are_sharded_unless_their_weights_are_used_directly(name):
    assert [rank[name] for rank in ranks()] == [SHARDED[name]] * 2


@pytest.mark.parametrize("method", ["step", "predict"])
def test_weight_that_is_used_directly_without_an_example_is_one_message(method):
    for rank in ranks():
        assert rank[method].startswith(
            "strategy=tp: the model uses the weight of a sharded layer without calling the layer"
        )
        assert "lab.trainer(..., example=dataset[0])" in rank[method]


def losses_by_keyword(strategy: str) -> list[float]:
    inputs = torch.linspace(-1, 1, 24).view(4, 6)
    with Lab(strategy, device="cpu", timeout=30) as lab:
        trainer = lab.trainer(ByKeyword().double(), tasks.Classification(), SGD, batch_size=4)
        labels = torch.arange(4)
        return [float(trainer.step(inputs.double(), labels)) for _ in range(3)]


def test_layer_that_is_called_by_keyword_is_sharded():
    expected = losses_by_keyword("single")
    for losses in run_world(2, losses_by_keyword, "tp"):
        assert losses == pytest.approx(expected, rel=1e-12)


def efficientnet(strategy: str, tried: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and weights of a model of depthwise and squeeze-and-excitation blocks."""
    torch.set_default_dtype(torch.float64)
    images = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(images, torch.arange(32) % 10)
    with Lab(strategy, device="cpu", timeout=100) as lab:
        model = efficientnet_b0(
            weights=None, num_classes=10, dropout=0.0, stochastic_depth_prob=0.0
        )
        make = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
        example = data[0] if tried else None
        trainer = lab.trainer(model, tasks.Classification(), make, batch_size=16, example=example)
        losses = [trainer.step(*batch).item() for batch in trainer.batches(data, 0)]
        weights, _ = gather_full_state(trainer.strategy, trainer.state.weights())
        return losses, weights


@pytest.mark.slow
def test_efficientnet_equals_single():
    """Of 82 layers 66 are sharded, depthwise and squeeze-and-excitation ones among them."""
    expected, weights = run_world(1, efficientnet, "single", False)[0]
    for tried in (True, False):
        losses, sharded_weights = run_world(2, efficientnet, "tp", tried)[0]
        assert losses == pytest.approx(expected, rel=1e-12)
        for name, tensor in weights.items():
            torch.testing.assert_close(
                sharded_weights[name], tensor, atol=1e-12, rtol=1e-12, msg=name
            )


class Doubled(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Linear(3, 4), True),
        (nn.Linear(3, 5), False),
        (Doubled(3, 4), False),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), False),
        (nn.MultiheadAttention(4, 2).out_proj, False),
        (nn.Conv2d(3, 4, 3), True),
        (nn.Conv2d(4, 4, 3, groups=2), False),
        (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), False),
    ],
)
def test_layer_is_sharded_only_if_the_ranks_compute_as_much_and_as_torch_does(layer, expected):
    assert can_be_sharded(layer, 2) == expected
