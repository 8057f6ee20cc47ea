"""Initial weights by block name, `model.init=by_block`."""

import copy
from collections import OrderedDict

import pytest
import torch
from configs import config
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.models.initial_weights import InitialWeights
from ddp_lab.models.make import make_model
from ddp_lab.models.trial import Trial
from ddp_lab.run.build_model import model_spec
from ddp_lab.strategies.parameters import fill
from ddp_lab.strategies.single import Single
from ddp_lab.world.runtime import Runtime

SHAPE = {"in_channels": 1, "image_size": 28, "num_classes": 10}
TRIAL = Trial(torch.zeros(2, 1, 28, 28), lambda logits: None)
CPU = torch.device("cpu")


def made(node: dict, seed: int = 3):
    return make_model(model_spec({"init": "by_block", **node}, SHAPE), Runtime("cpu"), seed, TRIAL)


def weights_of(node: dict, seed: int = 3) -> dict[str, torch.Tensor]:
    """Return the complete model's weights under `single`."""
    model, initial_weights, *_ = made(node, seed)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    strategy = Single(Runtime("cpu"))
    strategy.expect(initial_weights=initial_weights)
    strategy.setup(model)
    return strategy.module.state_dict()


def group(name: str, **changed) -> dict:
    return dict(config(f"model={name}").model) | changed


def test_draw_depends_on_seed_and_name_only():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    complete = weights_of(group("vit"))
    weights = made(group("vit")).initial_weights
    torch.set_rng_state(state)
    for name in ("head", "block2", "embed"):  # in another order than that of the model
        drawn = weights.of(name)
        assert drawn.keys() == {
            key.removeprefix(f"{name}.") for key in complete if key.startswith(f"{name}.")
        }
        assert all(torch.equal(tensor, complete[f"{name}.{key}"]) for key, tensor in drawn.items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(complete["block0.fc1.weight"], complete["block1.fc1.weight"])
    assert not torch.equal(
        weights_of(group("vit"), seed=4)["block0.fc1.weight"], complete["block0.fc1.weight"]
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lenet", {"init_std": None}),
        ("resnet18", {"init_std": None}),
        ("book_resnet18", {"init_std": 0.05}),
    ],
)
def test_weights_by_block_have_the_distribution_of_the_constructors(name, options):
    node = group(name, **options)
    torch.manual_seed(0)
    default = make_model(
        model_spec({**node, "init": "default"}, SHAPE), Runtime("cpu"), 3, TRIAL
    ).model.state_dict()
    weights = made(node | {"init": "by_block"}).initial_weights
    # ResNet's last ones are like these, and large
    blocks = {*list(weights.blocks)[:4], list(weights.blocks)[-1]}
    drawn = {
        f"{block}.{key}": tensor for block in blocks for key, tensor in weights.of(block).items()
    }
    compared = {key: tensor for key, tensor in default.items() if key.split(".")[0] in blocks}
    assert drawn.keys() == compared.keys()
    for key, tensor in compared.items():
        if tensor.unique().numel() < 2:
            assert torch.equal(drawn[key], tensor), key
        else:
            assert not torch.equal(drawn[key], tensor), key
            if tensor.numel() > 500:
                assert drawn[key].std().item() == pytest.approx(tensor.std().item(), rel=0.1), key


class Scaled(nn.Module):
    """A frozen layer, a buffer outside checkpoints, and a parameter of `reset_parameters`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(784, 10).requires_grad_(False)
        self.scale = nn.Parameter(torch.empty(10))
        self.register_buffer("order", torch.empty(3, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.layer.reset_parameters()
        nn.init.uniform_(self.scale, 1, 2)
        self.order.copy_(torch.tensor([1, 2, 3]))

    def forward(self, inputs):
        return self.layer(inputs) * self.scale


class ReadsWeight(nn.Linear):
    def __init__(self):
        super().__init__(784, 10)
        self.largest = self.weight.max().item()


def scaled():
    return nn.Sequential(nn.Flatten(), Scaled())


def reads():
    return nn.Sequential(nn.Flatten(), ReadsWeight())


def test_frozen_parameters_stay_frozen_and_buffers_that_are_not_saved_are_filled():
    model, initial_weights, notes, *_ = made({"_target_": f"{__name__}.scaled"})
    assert notes == ["2 parameters are frozen: 1.layer.weight, 1.layer.bias"]
    fill(model, initial_weights, CPU)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == [
        "1.scale"
    ]
    assert 1 <= model.get_parameter("1.scale").min() < model.get_parameter("1.scale").max() <= 2
    assert model.get_buffer("1.order").tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "own_models.attention",
            "init=by_block: 1.attention (MultiheadAttention) has in_proj_weight, in_proj_bias, but "
            "no method reset_parameters",
        ),
        (
            f"{__name__}.reads",
            f"_target_={__name__}.reads: cannot be constructed on the meta device, which has no "
            "values, as",
        ),
        (
            "torch.nn.Flatten",
            "init=by_block: needs a model made of blocks, got a Flatten. Use model.init=default, "
            "or return",
        ),
    ],
)
def test_models_that_cannot_be_drawn_by_block_are_refused(target, message):
    with pytest.raises(ConfigError) as error:
        made({"_target_": target})
    assert str(error.value).startswith(f"model.{message}")


def test_tied_weights_are_those_of_the_first_block_also_if_it_is_elsewhere():
    model, initial_weights, *_ = made({"_target_": "own_models.one_weight"})
    part = nn.Sequential(OrderedDict([("4", copy.deepcopy(model[4]))]))
    fill(model, initial_weights, CPU)
    fill(part, initial_weights, CPU)
    assert model[4].weight is model[2].weight
    assert torch.equal(part.get_submodule("4").weight, model[2].weight)
    assert torch.equal(part.get_submodule("4").bias, model[4].bias)

    initial_weights.set_weights({"2.weight": torch.full((16, 16), 2.0)})
    fill(part, initial_weights, CPU)
    assert (part.get_submodule("4").weight == 2).all()


def test_tensors_that_reset_parameters_leaves_out_are_named():
    class Incomplete(Scaled):
        def reset_parameters(self):
            kept = self.scale.detach().clone()
            super().reset_parameters()
            with torch.no_grad():
                self.scale[1] = kept[1]

    with torch.device("meta"):
        module = Incomplete()
    with pytest.raises(ConfigError, match=r"reset_parameters does not set a\.scale completely"):
        InitialWeights(Chain((1, 28, 28), a=module), 3).of("a")


def test_file_of_weights_takes_precedence_block_by_block(tmp_path, monkeypatch):
    node = group("vit")
    state = {name: tensor + 1 for name, tensor in weights_of(node).items()}
    # of seven classes
    state["head.linear.weight"] = torch.ones(7, 64)
    state["head.linear.bias"] = torch.ones(7)
    torch.save(state, tmp_path / "vit.pt")
    model, initial_weights, notes, *_ = made({**node, "weights": f"{tmp_path}/vit.pt"})
    assert notes[1:] == [
        "head.linear.weight, head.linear.bias: initialised anew, for 10 classes instead of 7"
    ]
    fill(model, initial_weights, CPU)
    for name, tensor in model.state_dict().items():
        expected = torch.zeros_like(tensor) if name.startswith("head.linear") else state[name]
        assert torch.equal(tensor, expected), name
    monkeypatch.setattr(initial_weights, "_draw", None)
    initial_weights.of("block1")  # does not draw what the file has
