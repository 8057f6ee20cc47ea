import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet18 as torchvision_resnet18

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.book_resnet import book_resnet18
from ddp_lab.models.lenet import lenet
from ddp_lab.models.make import build_model
from ddp_lab.models.partition import Partition, cut
from ddp_lab.models.resnet import resnet18
from ddp_lab.models.simple_cnn import simple_cnn
from ddp_lab.run.build_model import model_spec


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


@pytest.mark.parametrize(
    ("make", "smallest"),
    [(lenet, 14), (resnet18, 9), (book_resnet18, 9), (lambda *shape: simple_cnn(*shape[:3]), 2)],
)
def test_models_take_shapes_and_classes_from_the_data_and_refuse_too_small_images(make, smallest):
    for channels, size, classes in (3, 32, 10), (1, 28, 7), (1, smallest, 10):
        model = make(channels, size, classes, None)
        assert model.input_shape == (channels, size, size)
        assert model(torch.randn(2, channels, size, size)).shape == (2, classes)
    with pytest.raises(
        ConfigError,
        match=f"^model=.*: needs images of at least {smallest}x{smallest} pixels, got "
        f"{smallest - 1}x",
    ):
        make(1, smallest - 1, 10, None)


def test_resnet18_computes_torchvisions_with_a_small_stem():
    model = resnet18(1, 28, 10, None).eval()
    assert count(model) == 11_172_810
    reference = torchvision_resnet18(num_classes=10).eval()
    reference.conv1 = torch.nn.Conv2d(1, 64, 3, 1, 1, bias=False)
    reference.maxpool = torch.nn.Identity()
    reference.load_state_dict(
        dict(zip(reference.state_dict(), model.state_dict().values(), strict=True))
    )
    images = torch.randn(2, 1, 28, 28)
    assert torch.equal(model(images), reference(images))


def test_book_resnet18_init_std_draws_weights_and_keeps_biases():
    torch.manual_seed(0)
    default = book_resnet18(1, 28, 10, None).state_dict()
    torch.manual_seed(0)
    model = book_resnet18(1, 28, 10, 0.01)
    drawn = {
        f"{name}.weight"
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    }
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, default[name]) == (name not in drawn), name
        if name in drawn:
            assert tensor.std().item() == pytest.approx(0.01, rel=0.1)


def book_forward(state: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    """Return the logits as section 13.6 describes the network, by functions and weights' names."""

    def conv(name: str, inputs: torch.Tensor, stride: int = 1) -> torch.Tensor:
        weight = state[f"{name}.weight"]
        return F.conv2d(inputs, weight, state[f"{name}.bias"], stride, padding=weight.size(2) // 2)

    def norm(name: str, inputs: torch.Tensor) -> torch.Tensor:
        mean = inputs.mean((0, 2, 3), keepdim=True)
        variance = ((inputs - mean) ** 2).mean((0, 2, 3), keepdim=True)
        scale, shift = (state[f"{name}.{kind}"].view(1, -1, 1, 1) for kind in ("weight", "bias"))
        return (inputs - mean) / (variance + 1e-5).sqrt() * scale + shift

    outputs = norm("stem.1", conv("stem.0", images)).relu()
    for block, stride in [
        (f"layer{i}_{j}", 2 if i > 1 and j == 0 else 1) for i in (1, 2, 3, 4) for j in (0, 1)
    ]:
        inner = norm(f"{block}.bn1", conv(f"{block}.conv1", outputs, stride)).relu()
        inner = norm(f"{block}.bn2", conv(f"{block}.conv2", inner))
        shortcut = (
            conv(f"{block}.shortcut", outputs, stride)
            if f"{block}.shortcut.weight" in state
            else outputs
        )
        outputs = (inner + shortcut).relu()
    return outputs.mean((2, 3)) @ state["head.2.weight"].T + state["head.2.bias"]


def test_book_resnet18_computes_the_network_of_section_13_6():
    torch.manual_seed(0)
    model = book_resnet18(1, 28, 10, None).double()
    assert count(model) == 11_175_818
    assert [name for name, _ in model.named_children()] == [
        name for name, _ in resnet18(1, 28, 10, None).named_children()
    ]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                # otherwise a swapped scale and shift would not be detected
                parameter.add_(torch.rand_like(parameter))
    images = torch.rand(4, 1, 28, 28, dtype=torch.float64)
    expected = book_forward(
        {name: tensor.clone() for name, tensor in model.state_dict().items()}, images
    )
    assert torch.allclose(model(images), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("costs", "sizes"),
    [
        ([1, 1, 1, 1], [2, 2]),
        ([1, 1, 1, 3], [3, 1]),
        ([5, 1, 1, 1], [1, 1, 2]),
        ([1, 2], [1, 1]),
        ([1, 2, 3], [3]),
        ([1, *[10] * 48, 1], [7, *[6] * 6, 7]),
    ],
)
def test_cut_minimises_the_most_expensive_stage(costs, sizes):
    parts = cut(costs, len(sizes))
    assert [len(part) for part in parts] == sizes
    assert [index for part in parts for index in part] == list(range(len(costs)))


def test_chains_that_read_values_are_cut_by_their_flops():
    model = build_model(
        model_spec(
            {"_target_": "own_models.waiting_blocks"},
            {"in_channels": 1, "image_size": 8, "num_classes": 10},
        ),
    )
    parts = Partition(model, 2)
    assert parts.flops == [0, 2 * 64 * 24, 2 * 24 * 24, 2 * 24 * 10]
    assert [list(shape) for shape in parts.shapes] == [[1, 8, 8], [64], [24], [24], [10]]
