import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet18 as torchvision_resnet18

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.book_resnet import book_resnet18, draw_weights
from ddp_lab.models.lenet import lenet
from ddp_lab.models.make import build_model
from ddp_lab.models.partition import Partition, cut, trace
from ddp_lab.models.resnet import resnet18
from ddp_lab.models.simple_cnn import simple_cnn


def count(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_lenet_has_the_layers_of_section_13_5():
    torch.manual_seed(0)
    model = lenet(1, 28, 10, init_std=0.01)
    assert count(model) == 129_068
    assert [name for name, _ in model.named_children()] == ["conv1", "conv2", "fc1", "fc2"]
    layers = [str(layer) for layer in model.modules() if not list(layer.children())]
    assert layers == [
        "Conv2d(1, 20, kernel_size=(3, 3), stride=(1, 1))",
        "ReLU()",
        "AvgPool2d(kernel_size=2, stride=2, padding=0)",
        "Conv2d(20, 50, kernel_size=(5, 5), stride=(1, 1))",
        "ReLU()",
        "AvgPool2d(kernel_size=2, stride=2, padding=0)",
        "Flatten(start_dim=1, end_dim=-1)",
        "Linear(in_features=800, out_features=128, bias=True)",
        "ReLU()",
        "Linear(in_features=128, out_features=10, bias=True)",
    ]
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif parameter.numel() > 1000:
            assert parameter.std().item() == pytest.approx(0.01, rel=0.1)
            assert abs(parameter.mean().item()) < 0.001
    assert lenet(1, 28, 10, init_std=None).fc1[1].weight.std() > 0.015


@pytest.mark.parametrize(("channels", "size", "classes"), [(3, 32, 10), (1, 28, 7), (1, 14, 10)])
def test_models_take_shapes_and_classes_from_the_data(channels, size, classes):
    images = torch.randn(2, channels, size, size)
    with_std = (lambda *shape, make=make: make(*shape, None) for make in (lenet, resnet18, book_resnet18))
    for make in (*with_std, simple_cnn):
        model = make(channels, size, classes)
        assert model.input_shape == (channels, size, size)
        assert model(images).shape == (2, classes)


def test_models_refuse_images_that_are_too_small():
    with pytest.raises(ConfigError, match="model=lenet: needs images of at least 14x14 pixels, got 13x13"):
        lenet(1, 13, 10, None)
    with pytest.raises(ConfigError, match="model=resnet18: needs images of at least 9x9"):
        resnet18(1, 8, 10, None)
    with pytest.raises(ConfigError, match="model=book_resnet18: needs images of at least 9x9"):
        book_resnet18(1, 8, 10, None)


def test_resnet18_computes_torchvisions_with_a_small_stem():
    model = resnet18(1, 28, 10, None).eval()
    assert count(model) == 11_172_810
    reference = torchvision_resnet18(num_classes=10).eval()
    reference.conv1 = torch.nn.Conv2d(1, 64, 3, 1, 1, bias=False)
    reference.maxpool = torch.nn.Identity()
    reference.load_state_dict(dict(zip(reference.state_dict(), model.state_dict().values(), strict=True)))
    images = torch.randn(2, 1, 28, 28)
    assert torch.equal(model(images), reference(images))


WIDTHS = (64, 128, 256, 512)


def conv_parameters(in_channels: int, out_channels: int, kernel: int) -> int:
    return in_channels * out_channels * kernel**2 + out_channels


def test_book_resnet18_has_the_layers_of_section_13_6():
    model = book_resnet18(1, 28, 10, 0.01)
    expected = conv_parameters(1, 64, 3) + 2 * 64 + 512 * 10 + 10
    for before, width in zip((64, *WIDTHS), WIDTHS, strict=False):
        expected += conv_parameters(before, width, 3) + 3 * conv_parameters(width, width, 3) + 4 * 2 * width
        expected += conv_parameters(before, width, 1) if before != width else 0
    assert count(model) == expected == 11_175_818
    convolutions = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)}
    assert len(convolutions) == 20
    assert all(layer.bias is not None for layer in convolutions.values())
    shortcuts = {name: layer for name, layer in convolutions.items() if layer.kernel_size == (1, 1)}
    assert list(shortcuts) == ["layer2_0.shortcut", "layer3_0.shortcut", "layer4_0.shortcut"]
    assert all(layer.stride == (2, 2) for layer in shortcuts.values())
    norms = [name for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)]
    assert norms == ["stem.1", *(f"layer{i}_{j}.bn{k}" for i in (1, 2, 3, 4) for j in (0, 1) for k in (1, 2))]
    assert [name for name, _ in model.named_children()] == [name for name, _ in resnet18(1, 28, 10, None).named_children()]


def test_book_resnet18_init_std_draws_weights_and_keeps_biases():
    torch.manual_seed(0)
    default = book_resnet18(1, 28, 10, None).state_dict()
    torch.manual_seed(0)
    model = book_resnet18(1, 28, 10, 0.01)
    drawn = {f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, default[name]) == (name not in drawn), name
        if name in drawn:
            assert tensor.std().item() == pytest.approx(0.01, rel=0.1)
    biases = [model.get_parameter(name.replace("weight", "bias")) for name in drawn]
    assert all(bias.abs().min() > 0 for bias in biases)
    with torch.no_grad():
        model.stem[1].weight.fill_(3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    draw_weights(model, 0.01)  # as section 13.6 does between runs of the same network object
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == drawn


def book_forward(state: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    """Return the logits as section 13.6 describes the network, from functions and the weights' names only."""

    def conv(name: str, inputs: torch.Tensor, stride: int = 1) -> torch.Tensor:
        weight = state[f"{name}.weight"]
        return F.conv2d(inputs, weight, state[f"{name}.bias"], stride, padding=weight.size(2) // 2)

    def norm(name: str, inputs: torch.Tensor) -> torch.Tensor:
        mean = inputs.mean((0, 2, 3), keepdim=True)
        variance = ((inputs - mean) ** 2).mean((0, 2, 3), keepdim=True)
        scale, shift = (state[f"{name}.{kind}"].view(1, -1, 1, 1) for kind in ("weight", "bias"))
        return (inputs - mean) / (variance + 1e-5).sqrt() * scale + shift

    outputs = norm("stem.1", conv("stem.0", images)).relu()
    for block, stride in [(f"layer{i}_{j}", 2 if i > 1 and j == 0 else 1) for i in (1, 2, 3, 4) for j in (0, 1)]:
        inner = norm(f"{block}.bn1", conv(f"{block}.conv1", outputs, stride)).relu()
        inner = norm(f"{block}.bn2", conv(f"{block}.conv2", inner))
        shortcut = conv(f"{block}.shortcut", outputs, stride) if f"{block}.shortcut.weight" in state else outputs
        outputs = (inner + shortcut).relu()
    return outputs.mean((2, 3)) @ state["head.2.weight"].T + state["head.2.bias"]


def test_book_resnet18_computes_the_network_of_section_13_6():
    torch.manual_seed(0)
    model = book_resnet18(1, 28, 10, None).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(
                    torch.rand_like(parameter)
                )  # with scales of one and shifts of zero a swapped pair would not be detected
    images = torch.rand(4, 1, 28, 28, dtype=torch.float64)
    expected = book_forward({name: tensor.clone() for name, tensor in model.state_dict().items()}, images)
    assert torch.allclose(model(images), expected, rtol=1e-9, atol=0)


def test_trace_counts_the_flops_of_lenet():
    conv1 = 2 * 26 * 26 * 20 * 9
    conv2 = 2 * 9 * 9 * 50 * 20 * 25
    flops, _ = trace(lenet(1, 28, 10, None))
    assert flops == [conv1, conv2, 2 * 800 * 128, 2 * 128 * 10]


@pytest.mark.parametrize(
    ("costs", "stages", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1, 1, 1, 3], 2, [3, 1]),
        ([5, 1, 1, 1], 3, [1, 1, 2]),
        ([1, 2], 2, [1, 1]),
        ([1, 2, 3], 1, [3]),
    ],
)
def test_cut_minimises_the_most_expensive_stage(costs, stages, expected):
    parts = cut(costs, stages)
    assert [index for part in parts for index in part] == list(range(len(costs)))
    loads = [sum(costs[i] for i in part) for part in parts]
    wanted = iter(costs)
    assert max(loads) == max(sum(next(wanted) for _ in range(size)) for size in expected)
    assert all(len(part) for part in parts)


MODELS = {
    "lenet": lambda: lenet(1, 28, 10, None),
    "resnet18": lambda: resnet18(3, 16, 10, None),
    "book_resnet18": lambda: book_resnet18(3, 16, 10, None),
}


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_partition_assigns_every_block_to_one_stage(model, stages):
    chain = MODELS[model]()
    partition = Partition(chain, stages)
    assert partition.names == [name for name, _ in chain.named_children()]
    assert len(partition.parts) == len(partition.shares) == stages
    assert [index for part in partition.parts for index in part] == list(range(len(chain)))
    assert all(sum(count(chain[index]) for index in part) > 0 for part in partition.parts), "a stage has no parameters"
    assert sum(partition.shares) == pytest.approx(1)
    assert all(share > 0 for share in partition.shares)


def test_partition_cuts_resnet18_by_flops():
    partition = Partition(MODELS["resnet18"](), 2)
    assert partition.parts == [range(0, 5), range(5, 10)]
    assert partition.shares == pytest.approx([0.5167, 0.4833], abs=1e-4)
    assert partition.describe(["a", "b"]) == (
        "stem layer1_0 layer1_1 layer2_0 layer2_1 on a (52% of the FLOPs), "
        "layer3_0 layer3_1 layer4_0 layer4_1 head on b (48% of the FLOPs)"
    )


@pytest.mark.parametrize(
    ("starts", "parts"),
    [
        (["fc2"], [range(0, 3), range(3, 4)]),
        (("conv2", "fc1"), [range(0, 1), range(1, 2), range(2, 4)]),
        (["conv2", "fc1", "fc2"], [range(i, i + 1) for i in range(4)]),
    ],
)
def test_partition_cuts_at_given_names(starts, parts):
    chain = lenet(1, 28, 10, None)
    partition = Partition(chain, len(parts), starts)
    assert partition.parts == parts
    flops, _ = trace(chain)
    assert partition.shares == pytest.approx([sum(flops[i] for i in part) / sum(flops) for part in parts])


@pytest.mark.parametrize("model", MODELS)
def test_partition_shapes_are_those_of_a_forward_pass(model):
    chain = MODELS[model]()
    before = {name: tensor.clone() for name, tensor in chain.state_dict().items()}
    partition = Partition(chain, 2)
    assert chain.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in chain.state_dict().items()), "trace changed the model"
    activation = torch.randn(3, *chain.input_shape)
    seen = [activation.shape[1:]]
    for block in chain:
        activation = block(activation)
        seen.append(activation.shape[1:])
    assert partition.shapes == seen
    assert seen[-1] == (10,)


@pytest.mark.parametrize(
    ("stages", "starts", "message"),
    [
        (5, None, "the model cannot be cut into 5 stages: it has 4 blocks (conv1, conv2, fc1, fc2) and a stage needs"),
        (
            2,
            ["fc1", "fc2"],
            "strategy.cut=[fc1,fc2]: has 2 names, but 2 stages need 1: the first block of every stage but",
        ),
        (3, ["fc1"], "strategy.cut=[fc1]: has 1 names, but 3 stages need 2"),
        (1, ["fc1"], "strategy.cut=[fc1]: has 1 names, but 1 stages need 0"),
        (
            2,
            ["fc9"],
            "strategy.cut=[fc9]: must be blocks of the model in their order, the first excluded: some of conv2, fc1,",
        ),
        (2, ["conv1"], "strategy.cut=[conv1]: must be blocks of the model in their order, the first excluded"),
        (3, ["fc2", "fc1"], "strategy.cut=[fc2,fc1]: must be blocks of the model in their order"),
        (3, ["fc1", "fc1"], "strategy.cut=[fc1,fc1]: must be blocks of the model in their order"),
    ],
)
def test_partition_refuses_invalid_cuts(stages, starts, message):
    with pytest.raises(ConfigError) as error:
        Partition(lenet(1, 28, 10, None), stages, starts)
    assert str(error.value).startswith(message)


def test_chains_that_read_values_are_cut_by_their_flops():
    model = build_model({"_target_": "own_models.waiting_blocks"}, {"in_channels": 1, "image_size": 8, "num_classes": 10})
    state = torch.get_rng_state()
    parts = Partition(model, 2)
    assert parts.flops == [0, 2 * 64 * 24, 2 * 24 * 24, 2 * 24 * 10]
    assert [list(shape) for shape in parts.shapes] == [[1, 8, 8], [64], [24], [24], [10]]
    assert torch.equal(torch.get_rng_state(), state)
