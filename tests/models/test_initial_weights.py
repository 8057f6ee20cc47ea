"""Initial weights by block name, `model.init=by_block`."""

import gc
import weakref

import pytest
import torch
from configs import config
from torch import nn

from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.models.initial_weights import InitialWeights, draw, has_unset, unset
from ddp_lab.models.make import make_model
from ddp_lab.strategies.sharding import fill
from ddp_lab.strategies.single import Single
from ddp_lab.world.runtime import Runtime

SHAPE = {"in_channels": 1, "image_size": 28, "num_classes": 10}
CPU = torch.device("cpu")


def made(node: dict, seed: int = 3):
    return make_model({"init": "by_block", **node}, SHAPE, Runtime("cpu"), seed)


def weights_of(node: dict, seed: int = 3) -> dict[str, torch.Tensor]:
    """Return the complete model's weights under `single`."""
    model, initial_weights, _ = made(node, seed)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    strategy = Single(Runtime("cpu"))
    strategy.initial_weights = initial_weights
    strategy.setup(model)
    return strategy.module.state_dict()


def group(name: str, **changed) -> dict:
    return dict(config(f"model={name}").model) | changed


def test_draw_depends_on_seed_and_name_only():
    def linear():
        return nn.Linear(8, 8)

    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = draw(1, "fc1", linear)["weight"]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert torch.equal(draw(1, "fc1", linear)["weight"], first)
    for other in (draw(1, "fc2", linear), draw(2, "fc1", linear)):
        assert not torch.equal(other["weight"], first)


def test_blocks_are_drawn_alike_alone_and_in_the_complete_model():
    whole = weights_of(group("vit"))
    weights = made(group("vit")).initial_weights
    for name in ("head", "block2", "embed"):  # in another order than that of the model
        assert weights.of(name).keys() == {key.removeprefix(f"{name}.") for key in whole if key.startswith(f"{name}.")}
        assert all(torch.equal(tensor, whole[f"{name}.{key}"]) for key, tensor in weights.of(name).items())
    assert not torch.equal(whole["block0.fc1.weight"], whole["block1.fc1.weight"])
    assert not torch.equal(weights_of(group("vit"), seed=4)["block0.fc1.weight"], whole["block0.fc1.weight"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lenet", {"init_std": None}),
        ("lenet", {"init_std": 0.05}),
        ("simple_cnn", {}),
        ("resnet18", {"init_std": None}),
        ("book_resnet18", {"init_std": 0.05}),
    ],
)
def test_weights_by_block_have_the_distribution_of_the_constructors(name, options):
    node = group(name, **options)
    torch.manual_seed(0)
    default = make_model({**node, "init": "default"}, SHAPE, Runtime("cpu"), 3).model.state_dict()
    weights = made(node | {"init": "by_block"}).initial_weights
    blocks = dict.fromkeys(
        [*list(weights.blocks)[:4], list(weights.blocks)[-1]]
    )  # ResNet's last ones are like these, and large
    drawn = {f"{block}.{key}": tensor for block in blocks for key, tensor in weights.of(block).items()}
    compared = {key: tensor for key, tensor in default.items() if key.split(".")[0] in blocks}
    assert drawn.keys() == compared.keys()
    for key, tensor in compared.items():
        if tensor.unique().numel() < 2:
            assert torch.equal(drawn[key], tensor), key
        else:
            assert not torch.equal(drawn[key], tensor), key
            if tensor.numel() > 500:
                assert drawn[key].std().item() == pytest.approx(tensor.std().item(), rel=0.1), key


class Frozen(nn.Module):
    """A frozen layer, and a parameter that `reset_parameters` draws."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(784, 10).requires_grad_(False)
        self.scale = nn.Parameter(torch.empty(10))

    def reset_parameters(self):
        self.layer.reset_parameters()
        nn.init.uniform_(self.scale, 1, 2)

    def forward(self, inputs):
        return self.layer(inputs) * self.scale


class Incomplete(Frozen):
    def reset_parameters(self):
        nn.init.ones_(self.scale)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))

    def forward(self, inputs):
        return inputs * self.scale


class Reads(nn.Linear):
    def __init__(self):
        super().__init__(784, 10)
        self.largest = self.weight.max().item()


def frozen():
    return nn.Sequential(nn.Flatten(), Frozen())


def incomplete():
    return nn.Sequential(nn.Flatten(), Incomplete())


def bare():
    return nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(784, 10), Bare()))


def reads():
    return nn.Sequential(nn.Flatten(), Reads())


def tied():
    first, last = nn.Linear(784, 784), nn.Sequential(nn.Linear(784, 784), nn.Linear(784, 10))
    last[0].weight = first.weight
    return nn.Sequential(nn.Flatten(), first, last)


def of_this_file(function) -> dict:
    return {"_target_": f"{__name__}.{function.__name__}"}


def test_frozen_parameters_stay_frozen():
    model, initial_weights, notes = made(of_this_file(frozen))
    assert notes == ["2 parameters are frozen: 1.layer.weight, 1.layer.bias"]
    fill(model, initial_weights, CPU)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["1.scale"]
    assert 1 <= model.get_parameter("1.scale").min() < model.get_parameter("1.scale").max() <= 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (bare, "1.1 (Bare) has scale, but no method reset_parameters, which would draw the initial weights again. Add the"),
        (reads, f"{__name__}.reads cannot be constructed on the meta device, which has shapes and no values: RuntimeError: "),
        (tied, "1.weight and 2.0.weight are the same parameter, but would be allocated separately. Use model.init=default"),
        (nn.Flatten, "needs a model made of blocks, got torch.nn.Flatten, which returns a Flatten. Use model.init=default"),
    ],
)
def test_models_that_cannot_be_drawn_by_block_are_refused(function, message):
    node = of_this_file(function) if function is not nn.Flatten else {"_target_": "torch.nn.Flatten"}
    with pytest.raises(ConfigError) as error:
        made(node)
    assert str(error.value).startswith(f"model.init=by_block: {message}")


def test_tensors_that_reset_parameters_leaves_out_are_named():
    weights = made(of_this_file(incomplete)).initial_weights
    with pytest.raises(ConfigError, match=r"reset_parameters does not set 1\.layer\.weight completely"):
        weights.of("1")


def test_file_of_weights_takes_precedence_block_by_block(tmp_path, monkeypatch):
    node = group("vit")
    state = {name: tensor + 1 for name, tensor in weights_of(node).items()}
    state["head.linear.weight"], state["head.linear.bias"] = torch.ones(7, 64), torch.ones(7)  # of seven classes
    torch.save(state, tmp_path / "vit.pt")
    model, initial_weights, notes = made({**node, "weights": f"{tmp_path}/vit.pt"})
    assert notes[1:] == ["head.linear.weight, head.linear.bias: initialised anew, for 10 classes instead of 7"]
    fill(model, initial_weights, CPU)
    for name, tensor in model.state_dict().items():
        expected = torch.zeros_like(tensor) if name.startswith("head.linear") else state[name]
        assert torch.equal(tensor, expected), name
    monkeypatch.setattr("ddp_lab.models.initial_weights.draw", None)
    initial_weights.of("block1")  # does not draw what the file has


class Watched(InitialWeights):
    """Count the complete blocks that are in memory when another one is drawn."""

    def __init__(self, chain: Chain, seed: int):
        super().__init__(chain, seed)
        self.drawn: list[weakref.ref] = []
        self.alive: list[int] = []

    def of(self, name: str) -> dict[str, torch.Tensor]:
        gc.collect()
        self.alive.append(sum(tensor() is not None for tensor in self.drawn))
        state = super().of(name)
        self.drawn += map(weakref.ref, state.values())
        return state


def test_one_complete_block_at_a_time_is_in_memory():
    model = made(group("vit")).model
    weights = Watched(model, 3)
    fill(model, weights, CPU)
    assert weights.alive == [0] * 6
    assert len(weights.drawn) == len(model.state_dict())


class Positions(nn.Module):
    """A module with a buffer that checkpoints do not contain."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.empty(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.tensor([1.0, 2.0, 3.0]))


def test_buffers_that_are_not_saved_are_filled():
    model = Chain((1, 1, 1), first=Positions(), second=nn.Linear(2, 2))
    fill(model.to("meta"), InitialWeights(model, 3), CPU)
    assert model.first.angles.tolist() == [1.0, 2.0, 3.0]


def test_option_is_checked_and_only_vision_transformers_use_it_by_default():
    assert check(config("model=lenet")).model["init"] == "default"
    assert check(config("model=vit")).model["init"] == "by_block"
    with pytest.raises(ConfigError, match=r"model\.init=block: must be default or by_block"):
        check(config("model=lenet", "model.init=block"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool])
def test_elements_that_were_not_set_are_found(dtype):
    tensor = torch.ones(2, 3, dtype=dtype)
    assert not has_unset(tensor)
    tensor[1, 2] = unset(dtype)
    assert has_unset(tensor) == (dtype not in (torch.uint8, torch.bool)), "0 is a possible weight"
    assert not has_unset(tensor[:0])
