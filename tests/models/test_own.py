"""Models of users: `model=own model._target_=...`."""

import functools
import re
from collections.abc import Callable

import own_models
import pytest
import torch
from configs import config
from launches import OWN, ROOT, launch, main_in_world, only_run, read_metrics, refusal_in_world
from own_models import Plain
from torch import nn
from worlds import run_world

from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.models.make import build_model, key_of, require_chain
from ddp_lab.strategies.fsdp import units
from ddp_lab.strategies.split import Split
from ddp_lab.world.runtime import Runtime

SHAPE = {"in_channels": 1, "image_size": 28, "num_classes": 10}


def test_arguments_from_the_data_are_passed_where_the_signature_names_them():
    assert isinstance(build_model({"_target_": "own_models.Plain", "hidden": 8}, SHAPE), Plain)
    assert build_model({"_target_": "own_models.Greedy", "hidden": 8}, SHAPE).entry.out_features == 8


def test_sequential_becomes_a_chain_with_the_same_parameter_names():
    chain = build_model({"_target_": "own_models.sequential"}, SHAPE)
    assert isinstance(chain, Chain)
    assert chain.input_shape == (1, 28, 28)
    assert list(chain.state_dict()) == ["2.weight", "2.bias", "4.weight", "4.bias"]


@pytest.mark.parametrize("name", ["one_activation", "one_layer", "one_weight"])
def test_sequential_that_uses_a_module_or_a_weight_twice_computes_the_same(name):
    model = getattr(own_models, name)(**SHAPE)
    built = build_model({"_target_": f"own_models.{name}"}, SHAPE)
    assert built.state_dict().keys() == model.state_dict().keys()
    built.load_state_dict(model.state_dict())
    images = torch.rand(2, 1, 28, 28)
    assert torch.equal(built(images), model(images))
    assert isinstance(built, Chain) == (name != "one_layer")
    assert len(list(built.children())) == (5 if name == "one_layer" else len(model))


def test_sequential_with_a_training_mode_of_its_own_stays_what_it_is():
    built = build_model({"_target_": "own_models.Freezing"}, SHAPE)
    assert not built.train()[1].training
    with pytest.raises(ConfigError, match=r"is a Freezing with methods of its own\. Use single, scratch, dp, ddp or fsdp, or"):
        require_chain(built, "pipeline", "model._target_=own_models.Freezing")


def test_chain_refuses_a_layer_that_is_two_of_its_blocks():
    layer = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"^the blocks first and second of the model are the same Linear: .* Use a copy"):
        Chain((1, 2, 2), flatten=nn.Flatten(), first=layer, second=layer)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_module", {}, "model._target_=own_models.no_module: must return a torch.nn.Module, got int"),
        (
            "broken",
            {},
            r"model._target_=own_models.broken: cannot be constructed: KeyError: 'a bug' \(own_models.py, line \d+\)",
        ),
        (
            "Lazy",
            {},
            r"entry.weight of a lazy module has no shape yet. Call the model once .*self\(torch.zeros\(1, 1, 28, 28\)\)",
        ),
        ("Greedy", {"num_classes": 5}, "^model.num_classes=5: follows from the data, where it is 10; leave it out"),
    ],
)
def test_model_that_cannot_be_used_is_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_model({"_target_": f"own_models.{name}", **options}, SHAPE)


TORCHVISION = {"_target_": "ddp_lab.models.torchvision_models.torchvision_model", "name": "resnet50"}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (TORCHVISION, r"but model.name=resnet50 is a Plain\. Use .* or a model of ddp_lab, such as model=resnet18$"),
        (
            {"_target_": "own_models.Plain"},
            r"but model._target_=own_models.Plain is a Plain\. Use .* make a chain of the blocks:",
        ),
    ],
)
def test_advice_for_a_model_without_blocks_is_about_the_key_that_chose_it(node, message):
    with pytest.raises(ConfigError, match=message):
        require_chain(Plain(**SHAPE), "tp", key_of(node))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [],
            r"model\._target_: is missing; it must be the name of a class or function that Python can import, for example",
        ),
        (["model._target_=nonet.Net"], r"model\._target_=nonet.Net: must be .* \(No module named 'nonet'\)"),
        (["model._target_=own_models"], r"model\._target_=own_models: must be .*; it is a module"),
        (["model._target_=own_models.instance"], r"model\._target_=own_models.instance: must be .*; it is a Plain"),
        (["model._target_=own_models.Plain", "+model.hidden=wide"], r"model.hidden=wide: must be an integer"),
        (
            ["model._target_=own_models.Plain", "+model.hiden=8"],
            r"model.hiden=8: there is no such key; did you mean model.hidden",
        ),
    ],
)
def test_wrong_options_are_refused(overrides, message, caplog):
    with pytest.raises(ConfigError, match=message):
        check(config("model=own", *overrides))
    assert not caplog.records, "a second message was logged"


def test_units_of_fsdp_are_children_of_the_model_and_of_its_module_lists():
    model = Plain(**SHAPE)
    assert units(model, None) == [*model.blocks, model.entry, model.head]
    assert units(model, ["Residual"]) == [*model.blocks]
    assert units(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), ["Linear"])[0].in_features == 1


SPECIAL = {
    "SomeSteps": ["max_grad_norm=0.05"],
    "finetuned": ["max_grad_norm=0.05", "on_nan=skip", "check_replicas=1"],
    "vision_transformer": ["data.dataset.channels=3"],
}
BUCKETED = "strategy=scratch strategy.algorithm=bucketed strategy.bucket_mb=0.001"
LINES = [
    ("Plain", 2, "strategy=ddp"),
    ("finetuned", 2, BUCKETED),
    ("Plain", 2, "strategy=fsdp"),
    ("sequential", 2, "strategy=pipeline strategy.num_microbatches=4"),
    ("one_activation", 2, "strategy=pipeline strategy.num_microbatches=4"),
    ("one_weight", 2, "strategy=pipeline strategy.num_microbatches=4 strategy.cut=['5']"),
    ("one_layer", 2, "strategy=ddp"),
    ("SeveralTypes", 2, "strategy=scratch"),
    ("SeveralTypes", 2, BUCKETED),
    ("SomeSteps", 2, "strategy=fsdp"),
    ("changed_views", 2, "strategy=fsdp"),
    ("changed_views", 2, "strategy=mesh strategy.shard=2"),
    ("one_weight", 2, "strategy=tp +strategy.plan.2=replicate +strategy.plan.4=replicate"),
    ("attention", 2, "strategy=tp"),
    ("special_layers", 2, "strategy=tp"),
    *(
        pytest.param(*line, marks=pytest.mark.slow)
        for line in [
            ("ReadsValues", 2, "strategy=ddp accumulate=2"),
            ("Plain", 1, "strategy=dp"),
            ("Plain", 2, BUCKETED),
            ("Plain", 2, "strategy=scratch"),
            ("Plain", 2, "strategy=fsdp strategy.wrap=[Residual]"),
            ("sequential", 1, "strategy=split"),
            ("one_weight", 1, "strategy=split"),
            ("SeveralTypes", 2, "strategy=scratch strategy.algorithm=ring"),
            ("SeveralTypes", 2, "strategy=ddp"),
            ("SeveralTypes", 2, "strategy=fsdp"),
            ("one_layer", 2, "strategy=fsdp"),
            ("sequential", 2, "strategy=tp"),
            ("sequential", 2, "strategy=fsdp"),
            ("finetuned", 1, "strategy=dp"),
            ("finetuned", 2, "strategy=ddp"),
            ("finetuned", 2, "strategy=scratch"),
            ("finetuned", 2, "strategy=fsdp"),
            ("vision_transformer", 2, "strategy=fsdp"),
        ]
    ),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[[str], dict]:
    """The function that returns the final weights of `single` for a model."""

    @functools.cache
    def weights_of(name: str) -> dict:
        folder = tmp_path_factory.mktemp(name)
        run_world(1, main_in_world, *overrides_of(name), f"runs_dir={folder}")
        return weights(folder)

    return weights_of


def overrides_of(name: str) -> list[str]:
    return [*OWN, f"model._target_=own_models.{name}", "epochs=2", *SPECIAL.get(name, [])]


def weights(runs_dir) -> dict[str, torch.Tensor]:
    run = only_run(runs_dir)
    assert [record["epoch"] for record in read_metrics(run)] == [1, 2]
    return torch.load(run / "checkpoints" / "step_00000010.pt", weights_only=True)["model"]


@pytest.mark.parametrize(("name", "ranks", "strategy"), LINES, ids=lambda value: str(value).replace(" ", ","))
def test_every_strategy_equals_single(name, ranks, strategy, alone, tmp_path):
    run_world(ranks, main_in_world, *overrides_of(name), *strategy.split(), f"runs_dir={tmp_path}")
    found, expected = weights(tmp_path), alone(name)
    assert found.keys() == expected.keys()
    assert max((found[key] - expected[key]).abs().max().item() for key in found) <= 1e-6


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("strategy=ddp", "Expected to have finished reduction in the prior iteration"),
        ("strategy=scratch", "error: strategy=scratch: the parameter sometimes.weight got no gradient in a step on rank "),
        (BUCKETED, "error: strategy=scratch: the parameter sometimes.weight got no gradient in a step on rank "),
    ],
)
def test_parameters_that_some_steps_use_are_refused_with_a_remedy(strategy, message, tmp_path):
    line = "torchrun --standalone --nproc_per_node=2 train.py"
    code, output = launch(line, *overrides_of("SomeSteps"), *strategy.split(), f"runs_dir={tmp_path}")
    assert code == 1
    assert message in output
    assert "use strategy=fsdp or strategy=single, which support it" in " ".join(output.split())


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("pipeline", "4.weight is the same parameter as 2.weight, which is in another stage"),
        ("ddp_pipeline strategy.pp=2", "4.weight is the same parameter as 2.weight, which is in another stage"),
        ("mesh strategy.pp=2", "4.weight is the same parameter as 2.weight, which torch does not always update"),
        ("tp", "4.weight is the same parameter as 2.weight, which would be another one if"),
    ],
)
def test_strategy_that_would_train_a_shared_weight_twice_refuses_it(strategy, message, tmp_path):
    cut = "strategy.cut=['3']" if "pipeline" in strategy else ""
    line = f"{' '.join(OWN)} model._target_=own_models.one_weight strategy={strategy} {cut} batch_size=16 runs_dir={tmp_path}"
    code, printed = run_world(2, refusal_in_world, line)[0]
    assert code == 2
    assert f"error: strategy={strategy.split()[0]}: {message}" in printed


def test_split_refuses_a_weight_on_two_devices():
    model = build_model({"_target_": "own_models.one_weight"}, SHAPE)
    strategy = Split(Runtime("cpu"), ["cpu"] * len(model), 1)
    strategy.partition(model, 4)
    strategy.devices[4] = torch.device("meta")
    with pytest.raises(ConfigError, match=r"^strategy=split: 4\.weight is the same parameter as 2\.weight"):
        strategy.partition(model, 4)


@pytest.mark.parametrize("strategy", ["pipeline", "ddp_pipeline", "tp", "split"])
def test_strategy_that_cuts_refuses_a_model_without_blocks(strategy, tmp_path):
    ranks = 1 if strategy == "split" else 2
    line = f"{' '.join(OWN)} model._target_=own_models.Plain strategy={strategy} runs_dir={tmp_path}/runs"
    code, printed = run_world(ranks, refusal_in_world, line)[0]
    assert code == 2
    assert (
        f"error: strategy={strategy}: needs a model made of blocks, but model._target_=own_models.Plain is a Plain." in printed
    )
    assert "return Chain((in_channels, image_size, image_size), body=" in printed
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "model._target_=own_models.Plain strategy.wrap=[Block]",
            "strategy.wrap=[Block]: the model has no module of class Block; it has Linear, ModuleList, Plain, Residual",
        ),
        (
            "model._target_=own_models.Tied",
            "strategy=fsdp: blocks.1.inner.weight is the same parameter as blocks.0.inner.weight, which is in another unit",
        ),
        ("model._target_=own_models.Scalar", "strategy=fsdp: cannot shard the parameter scale, which has no dimensions."),
    ],
)
def test_fsdp_refuses_what_it_cannot_shard(overrides, message, tmp_path):
    line = f"{' '.join(OWN)} strategy=fsdp {overrides} runs_dir={tmp_path}/runs"
    code, printed = run_world(2, refusal_in_world, line)[0]
    assert code == 2
    assert message in printed


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy=pipeline", "strategy.cut=[3]"], ": 0 1 2 on .*, 3 4 on "),
        (["strategy=ddp_pipeline", "strategy.cut=[3]"], ": 0 1 2 on .*, 3 4 on "),
        (["strategy=mesh", "strategy.pp=2", "strategy.cut=[3]"], "pp 0 .* 0 .. 2 .* pp 1 .* 3 .. 4"),
        (["strategy=tp", "strategy.plan={2:replicate,4:replicate}"], "0 layers sharded .*, 2, 4 replicated"),
    ],
)
def test_blocks_of_a_sequential_are_named_by_integers(overrides, message, tmp_path):
    line = [*OWN, "model._target_=own_models.sequential", "epochs=1", *overrides, f"runs_dir={tmp_path}"]
    run_world(2, main_in_world, *line)
    assert re.search(message, (only_run(tmp_path) / "train.log").read_text(), re.DOTALL)


def test_model_is_found_in_the_directory_of_the_command(tmp_path):
    (tmp_path / "mynet.py").write_text(
        "from torch import nn\ndef net(num_classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))\n"
    )
    line = f"python {ROOT}/train.py model._target_=mynet.net runs_dir={tmp_path}/runs epochs=1"
    code, output = launch(line, *OWN, cwd=tmp_path)
    assert code == 0, output


def test_compile_is_disabled_where_a_strategy_needs_blocks(tmp_path):
    overrides = [*OWN, "model._target_=own_models.Plain", "strategy=ddp", "compile=true", "epochs=1", f"runs_dir={tmp_path}"]
    run_world(2, main_in_world, *overrides)
    log = (only_run(tmp_path) / "train.log").read_text()
    assert "compile=true is disabled: strategy=ddp compiles a model in blocks, and this one is not a Chain" in log
