"""Lazy layers get their parameters where the model is constructed.

Training is in the matrix (test_equivalence.py).
"""

from functools import partial

import pytest
import torch
from launches import OWN, launch, main_in_world, newest
from own_models import Lazy, ReadsValues
from torch import nn
from training import largest_difference
from worlds import run_world

from ddp_lab.advise.plan import model_to_plan
from ddp_lab.config.errors import ConfigError
from ddp_lab.lab.lab import Lab
from ddp_lab.models.lazy import lazy_layers, materialise
from ddp_lab.models.make import build_model, make_model
from ddp_lab.models.trial import Trial
from ddp_lab.run.build_model import model_spec
from ddp_lab.run.build_trained import open_run
from ddp_lab.world.runtime import Runtime

SHAPE = {"in_channels": 1, "image_size": 28, "num_classes": 10}
IMAGES = torch.zeros(2, 1, 28, 28)
TRIAL = Trial(IMAGES, lambda outputs: None)


def built(seed: int = 0, images: torch.Tensor = IMAGES) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(model_spec({"_target_": "own_models.Lazy"}, SHAPE), images)


def test_lazy_layers_get_shapes_and_nothing_else_changes():
    model = built()
    assert lazy_layers(Lazy(10))
    assert not lazy_layers(model)
    assert {type(module).__name__ for module in model.modules()} == {
        *("Lazy", "Sequential", "Conv2d", "BatchNorm2d", "Tanh", "Dropout", "Linear", "BatchNorm1d")
    }
    assert model.training_only.weight.shape == (16, 16), (
        "a layer that only training uses has no shape"
    )
    assert all(module.training for module in model.modules())
    norms = model.body[1], model.norm
    assert all(norm.num_batches_tracked == 0 == norm.running_mean.abs().max() for norm in norms)
    assert all(
        parameter.requires_grad and parameter.grad is None for parameter in model.parameters()
    )


def test_weights_depend_on_the_seed_and_not_on_the_samples():
    one = built(images=torch.rand(2, 1, 28, 28)).state_dict()
    other = built().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert largest_difference(built(1).state_dict(), one) > 0


def test_mode_of_each_layer_and_its_buffers_stay():
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.LazyLinear(3)).train()
    model[0].eval()
    model[0].running_mean.fill_(3)
    materialise(model, IMAGES, "the model")
    assert [module.training for module in model] == [False, True, True]
    assert model[0].running_mean.item() == 3


def test_by_block_draws_the_weights_of_layers_that_are_not_lazy():
    lazy, eager = (
        make_model(
            model_spec({"_target_": f"own_models.{name}", "init": "by_block"}, SHAPE),
            Runtime("cpu"),
            3,
            TRIAL,
        )
        for name in ("lazy_blocks", "eager_blocks")
    )
    for name in ("0", "2", "4"):
        one = lazy.initial_weights.of(name)
        other = eager.initial_weights.of(name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_plan_has_the_shapes():
    model = model_to_plan({"_target_": "own_models.Lazy"}, SHAPE, "float32", 0, TRIAL)
    expected = {name: tensor.shape for name, tensor in built().state_dict().items()}
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == expected
    assert all(parameter.is_meta for parameter in model.parameters())


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(2)

    def forward(self, inputs):
        raise KeyError("a bug")


class LazyReader(ReadsValues):
    """A model that the meta device cannot run, with a lazy layer."""

    def __init__(self, in_channels, image_size, num_classes):
        super().__init__(in_channels, image_size, num_classes)
        self.head = nn.LazyLinear(num_classes)


def test_failure_names_the_layer_and_the_reason():
    message = (
        "^the model: the first forward pass, which gives the lazy layer layer its shape, failed "
        "for inputs of shape "
    )
    with pytest.raises(
        ConfigError, match=rf"{message}\[1, 28, 28\]: KeyError: 'a bug' \(test_lazy.py, line \d+\)"
    ):
        materialise(Raises(), IMAGES, "the model")
    with torch.device("meta"):
        model = LazyReader(**SHAPE)
    with pytest.raises(
        ConfigError,
        match=r"lazy layer head its shape, failed on the meta device.* \(use model.init=default\)",
    ):
        materialise(model, IMAGES, "the model")
    assert not lazy_layers(
        model_to_plan({"_target_": "test_lazy.LazyReader"}, SHAPE, "float32", 0, TRIAL)
    )


def test_run_with_lazy_layers_is_resumed_and_opened(tmp_path):
    words = [*OWN, "model._target_=own_models.Lazy", "scheduler=constant", f"runs_dir={tmp_path}"]
    for name, epochs in (("long", 2), ("short", 1), ("short", 2)):
        run_world(1, main_in_world, *words, f"name={name}", f"epochs={epochs}")
    one = newest(tmp_path / "long")["model"]
    other = newest(tmp_path / "short")["model"]
    assert largest_difference(one, other) == 0
    model = open_run(tmp_path / "short", "auto").model
    assert largest_difference(model.state_dict(), one) == 0


def trained(strategy: str) -> dict[str, torch.Tensor]:
    """Train a model with lazy layers for an epoch, and return its weights on rank 0."""
    options = {} if strategy == "single" else {"batch_norm": "sync"}
    torch.set_default_dtype(torch.float64)
    images = torch.rand(10, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(images, torch.arange(10))
    with Lab(strategy, timeout=30, **options) as lab:
        model = nn.Sequential(
            nn.LazyConv2d(3, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(10)
        )
        loss = nn.CrossEntropyLoss(reduction="none")
        optimizer = partial(torch.optim.SGD, lr=0.1)
        with pytest.raises(
            ConfigError,
            match=r"^the model: 0 is a lazy layer, .*: "
            r"lab\.trainer\(\.\.\., example=dataset\[0\]\)",
        ):
            lab.trainer(model, loss, optimizer, 4)
        trainer = lab.trainer(model, loss, optimizer, 4, example=data[0])
        for inputs, targets in trainer.batches(data, 0, shuffle=False):
            trainer.step(inputs, targets)
        return {
            name: tensor.detach().clone()
            for name, tensor in trainer.strategy.module.state_dict().items()
        }


def test_lab_gives_shapes_by_its_example():
    (expected,) = run_world(1, trained, "single")
    for weights in run_world(2, trained, "ddp"):
        assert largest_difference(weights, expected) < 1e-12


def test_launch_on_two_ranks_has_the_same_weights(tmp_path):
    line = (
        "torchrun --standalone --nproc_per_node=2 train.py strategy=ddp check_replicas=1 epochs=1"
    )
    code, output = launch(line, *OWN, "model._target_=own_models.Lazy", f"runs_dir={tmp_path}")
    assert code == 0, output
