"""Networks of a few layers, of which each has something that a strategy may get wrong."""

import torch
from torch import nn

from ddp_lab.models.book_resnet import Residual, book_resnet18
from ddp_lab.models.chain import Chain
from ddp_lab.models.lenet import lenet
from ddp_lab.models.resnet import resnet18
from ddp_lab.models.vit import vit


def narrow_resnet(in_channels: int, image_size: int, num_classes: int, init_std: None) -> Chain:
    """Return a network of six layers of ResNet-18's kinds.

    It tests BatchNorm as well as twenty, in a tenth of the time.
    """
    return Chain(
        (in_channels, image_size, image_size),
        stem=nn.Sequential(
            nn.Conv2d(in_channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        ),
        layer1=Residual(8, 8),
        layer2=Residual(8, 16, stride=2),
        head=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes)),
    )


class Spare(nn.Module):
    """A layer that passes its input on, and whose parameters are never used."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


def partly_frozen(in_channels: int, image_size: int, num_classes: int, init_std: None) -> Chain:
    """Return a network with a frozen block, a frozen bias, unused parameters, and trained ones."""
    model = Chain(
        (in_channels, image_size, image_size),
        conv=nn.Sequential(nn.Conv2d(in_channels, 8, 3), nn.Tanh(), nn.AvgPool2d(2)),
        fc1=nn.Sequential(nn.Flatten(), nn.Linear(8 * (image_size // 2 - 1) ** 2, 16), nn.Tanh()),
        spare=Spare(),
        fc2=nn.Linear(16, num_classes),
    )
    model.conv.requires_grad_(False)
    model.fc1[1].bias.requires_grad = False
    return model


def tied(in_channels: int, image_size: int, num_classes: int, init_std: None) -> Chain:
    """Return a network with tied weights, a frozen bias, and parameters that are never used."""
    model = Chain(
        (in_channels, image_size, image_size),
        body=nn.Sequential(
            nn.Flatten(),
            nn.Linear(in_channels * image_size**2, 16),
            nn.Tanh(),
            nn.Linear(16, 16),
            nn.Tanh(),
        ),
        pair=nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)),
        spare=Spare(),
        head=nn.Linear(16, num_classes),
    )
    model.pair[2].weight = model.pair[0].weight
    model.body[1].bias.requires_grad = False
    return model


def small_vit(
    in_channels: int, image_size: int, num_classes: int, init_std: None, drop_path: float = 0.0
) -> Chain:
    """Return a Vision Transformer of two blocks and 16 tokens."""
    sizes = {"depth": 2, "width": 16, "heads": 4, "mlp_ratio": 2.0, "patch_size": 4}
    return vit(in_channels, image_size, num_classes, **sizes, pool="mean", drop_path=drop_path)


class BatchNormAct(nn.BatchNorm2d):
    """A BatchNorm that drops and activates its outputs like timm's BatchNormAct2d."""

    def __init__(self, channels: int, drop: nn.Module, act: nn.Module):
        super().__init__(channels)
        self.drop = drop
        self.act = act

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(input)))


def normalized(in_channels: int, image_size: int, num_classes: int, init_std: None) -> Chain:
    """Return a network with BatchNorm of each kind.

    1d over samples and over sequences, 2d, 3d, and one that activates.
    """
    return Chain(
        (in_channels, image_size, image_size),
        images=nn.Sequential(
            nn.Conv2d(in_channels, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        ),
        activated=nn.Sequential(
            nn.Conv2d(8, 8, 3, bias=False), BatchNormAct(8, nn.Identity(), nn.ReLU(inplace=True))
        ),
        volumes=nn.Sequential(
            nn.Unflatten(1, (4, 2)), nn.BatchNorm3d(4), nn.Tanh(), nn.Flatten(1, 2)
        ),
        sequences=nn.Sequential(
            nn.Flatten(2), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.Tanh()
        ),
        samples=nn.Sequential(
            nn.Flatten(),
            nn.Linear(8 * ((image_size - 4) ** 2 - 2), 16),
            nn.BatchNorm1d(16, affine=False, momentum=None),
            nn.Tanh(),
        ),
        head=nn.Linear(16, num_classes),
    )


def unbiased(in_channels: int, image_size: int, num_classes: int, init_std: None) -> Chain:
    """Return a network whose first of two stages has neither biases nor normalization layers.

    Its first block is empty.
    """
    return Chain(
        (in_channels, image_size, image_size),
        flatten=nn.Flatten(),
        first=nn.Sequential(nn.Linear(in_channels * image_size**2, 32, bias=False), nn.Tanh()),
        second=nn.Linear(32, num_classes),
    )


# how it is constructed, and the channels and the side of its images, by name
MODELS = {
    "partly_frozen": (partly_frozen, 1, 16),
    "unbiased": (unbiased, 1, 28),
    "tied": (tied, 1, 16),
    "lenet": (lenet, 1, 28),
    "vit": (small_vit, 3, 16),
    "narrow": (narrow_resnet, 3, 16),
    "normalized": (normalized, 3, 8),
    "resnet18": (resnet18, 3, 16),
    "book_resnet18": (book_resnet18, 3, 16),
}


def make_model(name: str, seed: int) -> Chain:
    make, channels, image_size = MODELS[name]
    torch.manual_seed(seed)
    return make(channels, image_size, 10, None)
