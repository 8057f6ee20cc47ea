"""Models of users: `model=own model._target_=...`."""

from pathlib import Path

import own_models
import pytest
import torch
from configs import config
from launches import OWN, launch, refusal_in_world
from own_models import Plain
from torch import nn
from worlds import run_world

from ddp_lab.config.build import build
from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.models.make import build_model, key_of, require_chain
from ddp_lab.strategies.split import Split
from ddp_lab.world.runtime import Runtime

SHAPE = {"in_channels": 1, "image_size": 28, "num_classes": 10}
TORCHVISION = {"_target_": "ddp_lab.models.torchvision_models.torchvision_model", "name": "resnet50"}


@pytest.mark.parametrize(
    ("name", "is_chain"), [("sequential", True), ("one_activation", True), ("one_weight", True), ("one_layer", False)]
)
def test_sequential_becomes_a_chain_that_computes_the_same_unless_it_has_a_layer_twice(name, is_chain):
    model = build({"_target_": f"own_models.{name}"}, **{"num_classes": 10} if name == "sequential" else SHAPE)
    built = build_model({"_target_": f"own_models.{name}"}, SHAPE)
    assert built.state_dict().keys() == model.state_dict().keys()
    built.load_state_dict(model.state_dict())
    images = torch.rand(2, 1, 28, 28)
    assert torch.equal(built(images), model(images))
    assert isinstance(built, Chain) == is_chain
    assert len(list(built.children())) == (len(model) if is_chain else 5)


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
    ("node", "model", "message"),
    [
        (TORCHVISION, Plain, r"needs a model made of blocks, but model.name=resnet50 is a Plain\. Use .* model=resnet18, or "),
        ({"_target_": "own_models.Freezing"}, own_models.Freezing, r"model._target_=own_models.Freezing is a Freezing\. Use "),
    ],
)
def test_advice_for_a_model_without_blocks_is_about_the_key_that_chose_it(node, model, message):
    with pytest.raises(ConfigError, match=message):
        require_chain(model(**SHAPE), "tp", key_of(node))


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


REFUSED = {
    "one_weight strategy=pipeline strategy.cut=['3']": "4.weight is the same parameter as 2.weight, which is in another",
    "one_weight strategy=ddp_pipeline strategy.pp=2 strategy.cut=['3']": "4.weight is the same parameter as 2.weight, which",
    "one_weight strategy=mesh strategy.pp=2": "4.weight is the same parameter as 2.weight, which torch does not always",
    "Plain strategy=pipeline": "needs a model made of blocks, but model._target_=own_models.Plain is a Plain.",
    "Wrong +model.how=tied strategy=fsdp": "blocks.1.inner.weight is the same parameter as blocks.0.inner.weight, which is in",
    "Wrong +model.how=scalar strategy=fsdp": "cannot shard the parameter scale, which has no dimensions.",
}


def refusals(folder: Path) -> list[tuple[object, str]]:
    line = f"{' '.join(OWN)} batch_size=16 runs_dir={folder} model._target_=own_models."
    return [refusal_in_world(line + words) for words in REFUSED]


def test_strategies_refuse_models_that_they_would_not_train_correctly(tmp_path):
    found = run_world(2, refusals, tmp_path / "runs")[0]
    for (words, message), (code, printed) in zip(REFUSED.items(), found, strict=True):
        assert (code, printed.startswith("error: strategy"), message in printed) == (2, True, True), f"{words}: {printed}"
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_split_refuses_a_weight_on_two_devices():
    model = build_model({"_target_": "own_models.one_weight"}, SHAPE)
    strategy = Split(Runtime("cpu"), ["cpu"] * len(model), 1)
    strategy.partition(model, 4)
    strategy.devices[4] = torch.device("meta")
    with pytest.raises(ConfigError, match=r"^strategy=split: 4\.weight is the same parameter as 2\.weight"):
        strategy.partition(model, 4)
