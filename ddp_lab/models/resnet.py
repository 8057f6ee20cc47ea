"""torchvision's ResNet-18 as a chain of ten blocks, with a stem for small images."""

from functools import partial

from torch import nn

from ddp_lab.config.types import Positive
from ddp_lab.models.chain import Chain, init_normal, require_image_size


def resnet18(
    in_channels: int, image_size: int, num_classes: int, init_std: Positive | None
) -> Chain:
    """Return the network: 11,172,810 parameters for 1 channel and 10 classes.

    The stem is a 3x3 convolution of stride 1 without max-pooling (He et al. 2015, arXiv:1512.03385,
    section 4.2): the original stem, a 7x7 convolution of stride 2 and pooling, would reduce a 28x28
    image to 7x7 pixels before the first block.

    Raises:
        ConfigError: the images are smaller than 9x9 pixels. The last blocks would then have
            activations of one pixel, and BatchNorm cannot normalise a batch of one such sample.
    """
    require_image_size("resnet18", image_size, 9)
    # takes 1.5 s, so only this model imports it
    from torchvision.models import resnet18 as torchvision_resnet18

    net = torchvision_resnet18(num_classes=num_classes)
    stem = nn.Conv2d(in_channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    draw_convolutions(stem)
    layers = {
        "layer1": net.layer1,
        "layer2": net.layer2,
        "layer3": net.layer3,
        "layer4": net.layer4,
    }
    model = Chain(
        (in_channels, image_size, image_size),
        stem=nn.Sequential(stem, net.bn1, net.relu),
        **{f"{name}_{i}": block for name, layer in layers.items() for i, block in enumerate(layer)},
        head=nn.Sequential(net.avgpool, nn.Flatten(), net.fc),
    )
    model.initializers.append(draw_convolutions)  # torchvision's constructor has already done so
    if init_std is not None:
        model.initialize(partial(init_normal, std=init_std))
    return model


def draw_convolutions(model: nn.Module) -> None:
    """Draw convolutions' weights as torchvision's ResNets do (He et al. 2015, arXiv:1502.01852)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
