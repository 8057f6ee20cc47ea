import pytest
import torch
from torchvision.models import resnet18 as torchvision_resnet18

from ddp_lab.errors import ConfigError
from ddp_lab.models.lenet import lenet
from ddp_lab.models.partition import block_flops, cut
from ddp_lab.models.resnet import resnet18
from ddp_lab.models.simple_cnn import simple_cnn


def count(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_lenet_is_the_books():
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
def test_models_follow_the_data(channels, size, classes):
    images = torch.randn(2, channels, size, size)
    for make in (lambda *shape: lenet(*shape, None), lambda *shape: resnet18(*shape, None), simple_cnn):
        model = make(channels, size, classes)
        assert model.input_shape == (channels, size, size)
        assert model(images).shape == (2, classes)


def test_images_too_small():
    with pytest.raises(ConfigError, match="model=lenet: needs images of at least 14x14, these are 13x13"):
        lenet(1, 13, 10, None)
    with pytest.raises(ConfigError, match="model=resnet18: needs images of at least 9x9"):
        resnet18(1, 8, 10, None)


def test_resnet18_is_torchvisions_with_a_small_stem():
    model = resnet18(1, 28, 10, None).eval()
    assert count(model) == 11_172_810
    reference = torchvision_resnet18(num_classes=10).eval()
    reference.conv1 = torch.nn.Conv2d(1, 64, 3, 1, 1, bias=False)
    reference.maxpool = torch.nn.Identity()
    reference.load_state_dict(dict(zip(reference.state_dict(), model.state_dict().values(), strict=True)))
    images = torch.randn(2, 1, 28, 28)
    assert torch.equal(model(images), reference(images))


def test_flops_of_lenet_by_hand():
    conv1 = 2 * 26 * 26 * 20 * 9
    conv2 = 2 * 9 * 9 * 50 * 20 * 25
    assert block_flops(lenet(1, 28, 10, None)) == [conv1, conv2, 2 * 800 * 128, 2 * 128 * 10]


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
def test_cut(costs, stages, expected):
    parts = cut(costs, stages)
    assert [index for part in parts for index in part] == list(range(len(costs)))
    loads = [sum(costs[i] for i in part) for part in parts]
    wanted = iter(costs)
    assert max(loads) == max(sum(next(wanted) for _ in range(size)) for size in expected)
    assert all(len(part) for part in parts)
