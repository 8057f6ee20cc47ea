"""Models of users: `model=own model._target_=...`."""

import pytest
import torch
from configs import config
from launches import OWN, launch
from torch import nn

from ddp_lab.config.build import build
from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.models.make import build_model
from ddp_lab.strategies.split import Split
from ddp_lab.world.runtime import Runtime

SHAPE = {"in_channels": 1, "image_size": 28, "num_classes": 10}


@pytest.mark.parametrize(
    ("name", "is_chain"), [("sequential", True), ("one_weight", True), ("one_layer", False), ("Freezing", False)]
)
def test_sequential_becomes_a_chain_that_computes_the_same_unless_it_has_a_layer_twice_or_a_method(name, is_chain):
    model = build({"_target_": f"own_models.{name}"}, **{"num_classes": 10} if name == "sequential" else SHAPE)
    built = build_model({"_target_": f"own_models.{name}"}, SHAPE)
    assert built.state_dict().keys() == model.state_dict().keys()
    built.load_state_dict(model.state_dict())
    images = torch.rand(2, 1, 28, 28)
    assert torch.equal(built.eval()(images), model.eval()(images))
    assert isinstance(built, Chain) == is_chain
    assert len(list(built.children())) == len(model if is_chain else {*model})


def test_chain_refuses_a_layer_that_is_two_of_its_blocks():
    layer = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"^the blocks first and second of the model are the same Linear: .* Use a copy"):
        Chain((1, 2, 2), flatten=nn.Flatten(), first=layer, second=layer)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_module", {}, "model._target_=own_models.no_module: must return a torch.nn.Module, got int"),
        ("Wrong", {"how": "raises"}, r"cannot be constructed: KeyError: 'a bug' \(own_models.py, line \d+\)"),
        ("Wrong", {"how": "lazy"}, r"entry.weight of a lazy module has no shape yet. .*self\(torch.zeros\(1, 1, 28, 28\)\)"),
        ("Plain", {"num_classes": 5}, "^model.num_classes=5: follows from the data, where it is 10; leave it out"),
    ],
)
def test_model_that_cannot_be_used_is_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_model({"_target_": f"own_models.{name}", **options}, SHAPE)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("", r"_: is missing; it must be the name of a class or function that Python can import, for example"),
        ("model._target_=nonet.Net", r"_=nonet.Net: must be .* \(No module named 'nonet'\)"),
        ("model._target_=own_models", r"_=own_models: must be .*; it is a module"),
        ("model._target_=own_models.instance", r"_=own_models.instance: must be .*; it is a Flatten"),
        ("model._target_=own_models.Plain +model.hidden=wide", r"model.hidden=wide: must be an integer"),
        ("model._target_=own_models.Plain +model.hiden=8", r"model.hiden=8: there is no such key; did you mean model.hidden"),
    ],
)
def test_wrong_options_are_refused(overrides, message, caplog):
    with pytest.raises(ConfigError, match=message):
        check(config("model=own", *overrides.split()))
    assert not caplog.records, "a second message was logged"


BUCKETED = "strategy=scratch strategy.algorithm=bucketed strategy.bucket_mb=0.001"


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("strategy=ddp", "Expected to have finished reduction in the prior iteration"),
        (BUCKETED, "error: strategy=scratch: the parameter sometimes.weight got no gradient in a step on rank "),
    ],
)
def test_parameters_that_some_steps_use_are_refused_with_a_remedy(strategy, message, tmp_path):
    line = "torchrun --standalone --nproc_per_node=2 train.py"
    code, output = launch(line, *OWN, "model._target_=own_models.SomeSteps", *strategy.split(), f"runs_dir={tmp_path}")
    assert code == 1
    assert message in output
    assert "use strategy=fsdp or strategy=single, which support it" in " ".join(output.split())


def test_split_refuses_a_weight_on_two_devices():
    model = build_model({"_target_": "own_models.one_weight"}, SHAPE)
    strategy = Split(Runtime("cpu"), ["cpu"] * len(model), 1)
    strategy.partition(model, 4)
    strategy.devices[4] = torch.device("meta")
    with pytest.raises(ConfigError, match=r"^strategy=split: 4\.weight is the same parameter as 2\.weight"):
        strategy.partition(model, 4)
