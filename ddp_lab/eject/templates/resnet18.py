"""model=resnet18"""

from collections import OrderedDict

from settings import IN_CHANNELS, INIT_STD, NUM_CLASSES
from torch import nn
from torchvision.models import resnet18


def initialize(module: nn.Module) -> None:
    """Draw the weights of convolutions and linear layers, and set their biases to 0."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.normal_(layer.weight, std=INIT_STD)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def build_model() -> nn.Module:
    """Return torchvision's ResNet-18 with a stem for small images: a 3x3 convolution."""
    net = resnet18(num_classes=NUM_CLASSES)
    stem = nn.Conv2d(IN_CHANNELS, 64, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    blocks = OrderedDict(stem=nn.Sequential(stem, net.bn1, net.relu))
    for number, layer in enumerate([net.layer1, net.layer2, net.layer3, net.layer4], 1):
        for place, block in enumerate(layer):
            blocks[f"layer{number}_{place}"] = block
    blocks["head"] = nn.Sequential(net.avgpool, nn.Flatten(), net.fc)
    model = nn.Sequential(blocks)
    if INIT_STD is not None:
        initialize(model)
    return model
