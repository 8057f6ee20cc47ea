"""Models of users: `model=own model._target_=...`, and their trial before the run.

Of some models training changes a part.
"""

from functools import partial

import pytest
import torch
from case import Case, config_of
from configs import config
from launches import OWN, launch, main_in_world, refusal_in_world
from own_models import ReadsValues, Wrong, finetuned
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from worlds import run_world

from ddp_lab.advise.fake import FakeWeights
from ddp_lab.config.build import call_target
from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.models import trial
from ddp_lab.models.chain import Chain
from ddp_lab.models.make import build_model
from ddp_lab.models.trial import Trial, check_logits, freeze_unused, random_like
from ddp_lab.run.build import build as build_job
from ddp_lab.run.build_model import model_spec
from ddp_lab.strategies.split import Split
from ddp_lab.world.runtime import Runtime

SHAPE = {"in_channels": 1, "image_size": 28, "num_classes": 10}


@pytest.mark.parametrize(
    ("name", "is_chain"),
    [("sequential", True), ("one_weight", True), ("one_layer", False), ("Freezing", False)],
)
def test_sequential_becomes_a_chain_that_computes_the_same_unless_it_has_a_layer_twice_or_a_method(
    name, is_chain
):
    model = call_target(
        {"_target_": f"own_models.{name}"}, **{"num_classes": 10} if name == "sequential" else SHAPE
    )
    built = build_model(model_spec({"_target_": f"own_models.{name}"}, SHAPE))
    assert built.state_dict().keys() == model.state_dict().keys()
    built.load_state_dict(model.state_dict())
    images = torch.rand(2, 1, 28, 28)
    assert torch.equal(built.eval()(images), model.eval()(images))
    assert isinstance(built, Chain) == is_chain
    assert len(list(built.children())) == len(model if is_chain else {*model})


def test_chain_refuses_a_layer_that_is_two_of_its_blocks():
    layer = nn.Linear(4, 4)
    with pytest.raises(
        ConfigError,
        match=r"^the blocks first and second of the model are the same Linear: .* Use a copy",
    ):
        Chain((1, 2, 2), flatten=nn.Flatten(), first=layer, second=layer)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "no_module",
            {},
            "model._target_=own_models.no_module: must return a torch.nn.Module, got int",
        ),
        (
            "Wrong",
            {"how": "raises"},
            r"cannot be constructed: KeyError: 'a bug' \(own_models.py, line \d+\)",
        ),
        (
            "Wrong",
            {"how": "lazy"},
            "_target_=own_models.Wrong: spare is a lazy layer that the forward pass does not use",
        ),
        (
            "Plain",
            {"num_classes": 5},
            "^model.num_classes=5: follows from the data, where it is 10; leave it out",
        ),
    ],
)
def test_model_that_cannot_be_used_is_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_model(model_spec({"_target_": f"own_models.{name}", **options}, SHAPE))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "",
            "_: is missing; it must be the name of a class or function that Python can import, for "
            "example",
        ),
        ("model._target_=nonet.Net", r"_=nonet.Net: must be .* \(No module named 'nonet'\)"),
        ("model._target_=own_models", r"_=own_models: must be .*; it is a module"),
        (
            "model._target_=own_models.instance",
            r"_=own_models.instance: must be .*; it is a Flatten",
        ),
        (
            "model._target_=own_models.Plain +model.hidden=wide",
            r"model.hidden=wide: must be an integer",
        ),
        (
            "model._target_=own_models.Plain +model.hiden=8",
            r"model.hiden=8: there is no such key; did you mean model.hidden",
        ),
    ],
)
def test_wrong_options_are_refused(overrides, message, caplog):
    with pytest.raises(ConfigError, match=message):
        check(config("model=own", *overrides.split()))
    assert not caplog.records, "a second message was logged"


BUCKETED = "strategy=scratch strategy.algorithm=bucketed strategy.bucket_mb=0.001"


@pytest.mark.parametrize(
    ("strategy", "model", "parameter"),
    [
        pytest.param("strategy=ddp", "SomeSteps", "sometimes.weight", marks=pytest.mark.slow),
        ("strategy=ddp", "Experts", "experts."),  # of which each rank has used others
        (BUCKETED, "Experts", "experts."),
    ],
)
def test_parameters_that_some_steps_use_are_refused_with_a_remedy(
    strategy, model, parameter, tmp_path
):
    line = "torchrun --standalone --nproc_per_node=2 train.py"
    name = strategy.split()[0].partition("=")[2]
    code, output = launch(
        line, *OWN, f"model._target_=own_models.{model}", *strategy.split(), f"runs_dir={tmp_path}"
    )
    assert code == 1
    text = " ".join(output.split())
    assert text.count(f"error: strategy={name}: the parameter {parameter}") == 1, output
    assert "got no gradient in a step on rank " in text
    assert "If only some steps use it, use strategy.find_unused_parameters=true, in a Lab" in text
    assert "RuntimeError" not in output


def test_split_copies_a_weight_of_two_devices_in_each_pass():
    """Fake tensors refuse operations on tensors of different devices."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model = build_model(model_spec({"_target_": "own_models.one_weight"}, SHAPE))
    strategy = Split(Runtime("cpu"), ["cpu", "cpu"], 1)
    strategy.expect(initial_weights=FakeWeights(fake))
    strategy.partition(model, 4)
    strategy.parts.parts = [range(4), range(4, 7)]
    strategy.devices = [torch.device("cuda:0"), torch.device("cuda:1")]
    with fake:
        strategy.setup(model)
        weight = model.get_parameter("2.weight")
        outputs = strategy.predict(torch.zeros(4, 1, 28, 28, device="cuda:0"))
    assert outputs.shape == (4, 10)
    assert model.get_parameter("4.weight") is weight
    assert weight.device == torch.device("cuda:0")
    assert model.get_parameter("4.bias").device == torch.device("cuda:1")


def tried(model: nn.Module, runtime: Runtime | None = None) -> list[str]:
    images = random_like(torch.zeros(2, 1, 28, 28))
    trial = Trial(images, partial(check_logits, classes=10))
    return freeze_unused(model, trial, runtime or Runtime("cpu"), "model._target_=net").notes


@pytest.mark.parametrize("large", [0, 10**9], ids=["meta device", "real images"])
def test_unused_parameters_are_frozen_and_named(large, monkeypatch):
    monkeypatch.setattr(trial, "LARGE", large)
    model = finetuned(**SHAPE)
    assert tried(model) == [
        "7 parameters are frozen: scale, entry.weight, entry.bias and 4 more",
        "2 parameters are not used in training, so they stay as they are: spare.weight, spare.bias",
    ]
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == [
        "head.weight",
        "head.bias",
    ]


def test_one_frozen_and_one_unused_parameter_are_named_in_the_singular():
    model = finetuned(**SHAPE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name != "scale"
    model.spare = torch.nn.Linear(2, 2, bias=False)
    assert tried(model) == [
        "1 parameter is frozen: scale",
        "1 parameter is not used in training, so it stays as it is: spare.weight",
    ]


@pytest.mark.parametrize(
    ("strategy", "frozen_without"), [("single", 0), ("scratch", 0), ("ddp", 6), ("fsdp", 0)]
)
def test_parameters_that_some_steps_may_use_are_not_frozen(strategy, frozen_without):
    """The images of the trial go through no expert. On one rank only DDP waits for gradients."""
    for key, frozen in (("", frozen_without), ("find_unused_parameters=true", 0)):
        case = f"{strategy} own=RareExperts unused {key}"
        with Case.of(case).default_dtype():
            job = build_job(config_of(case), Runtime("cpu"))
        assert sum(not parameter.requires_grad for parameter in job.model.parameters()) == frozen
        assert job.notes[0].startswith("6 parameters are not used ")


class Gated(nn.Sequential):
    """A model of which a layer is used for some images only: those whose first pixel is above 1."""

    def forward(self, images):
        hidden = self[0](images.flatten(1))
        return self[2](hidden + self[1](hidden) if images.flatten(1)[:, 0].max() > 1 else hidden)


def test_parameter_that_some_draws_of_the_trial_use_is_not_frozen():
    model = Gated(nn.Linear(784, 4), nn.Linear(4, 4), nn.Linear(4, 10))
    assert tried(model) == []
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("large", [0, 10**9])
def test_model_that_reads_values_is_tried_with_real_images(large, monkeypatch):
    monkeypatch.setattr(trial, "LARGE", large)
    (note,) = tried(ReadsValues(**SHAPE))
    assert note.endswith("they are: spare.weight, spare.bias"), "training_only is used in training"


def test_trial_changes_neither_the_model_nor_the_random_state():
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(784, 10))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    assert tried(model) == []
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "frozen",
            "has nothing to train: all parameters are frozen. Leave requires_grad=True for some",
        ),
        (
            "pixels",
            r"failed for images of 1x28x28 .*: ValueError: 28 pixels are too few \(own_models.py, "
            "line",
        ),
        (
            "pair",
            r"it returns a tuple of 2, but expected is one tensor \[b, \.\.\.\] .*`return "
            r"self.model\(inputs\)\[0\]`",
        ),
        (
            "pair when evaluated",
            r"in evaluation mode it returns a tuple of 2, but expected is one tensor",
        ),
        (
            "classes",
            r"failed .* TypeError: it must return logits of shape \[2, 10\] \(batch, classes\), "
            r"got \[2, 2\]",
        ),
        (
            "only float32",
            "failed .*: RuntimeError: no bf16 .* Use precision=float32, if a layer does not "
            "support bf16 on",
        ),
    ],
)
def test_model_that_cannot_be_trained_is_refused(how, message):
    model = Wrong(**SHAPE, how=how)
    runtime = Runtime("cpu", "bf16")
    with pytest.raises(ConfigError, match=f"model._target_=net: {message}"):
        tried(model, runtime)


def drawn() -> dict[str, list[float]]:
    """Return what this rank draws in its first step, by strategy."""
    numbers = {}
    with Runtime("cpu", timeout=30) as runtime:
        for case in ("ddp partly_frozen", "tp partly_frozen", "pipeline partly_frozen"):
            build_job(config_of(case), runtime).trainer().eager_step.prepare()
            numbers[case.split()[0]] = torch.rand(4).tolist()
    return numbers


def test_replicas_and_stages_draw_different_dropout_masks_and_tp_ranks_the_same():
    first, second = run_world(2, drawn)
    assert first["ddp"] != second["ddp"]
    assert first["tp"] == second["tp"] == first["ddp"]
    assert first["pipeline"] != second["pipeline"]


def test_resume_with_other_frozen_parameters_is_refused(tmp_path):
    overrides = [*OWN, "model._target_=own_models.finetuned", "name=a", f"runs_dir={tmp_path}"]
    run_world(1, main_in_world, *overrides, "epochs=1")
    code, printed = run_world(
        1, refusal_in_world, f"{' '.join(overrides)} epochs=2 +model.trained=entry"
    )[0]
    assert code == 2
    assert (
        "step_00000005.pt: the parameter entry.weight is trained in this launch and was frozen "
        "when the checkpoint was written. Freeze the same parameters, or begin a new run from "
        "these weights: model.weights="
    ) in printed
