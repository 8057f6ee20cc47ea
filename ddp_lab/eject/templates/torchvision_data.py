"""data=mnist, data=fashion_mnist and data=cifar10"""

import torch
from settings import ROOT
from torch import Tensor
from torchvision.datasets import MNIST


def load_data() -> dict[str, tuple[Tensor, Tensor]]:
    """Return images, uint8 [n, channels, height, width], and their classes."""
    sets = {}
    for name in ("train", "test"):
        dataset = MNIST(ROOT, train=name == "train", download=True)
        images = torch.as_tensor(dataset.data)
        if images.dim() == 3:
            images = images.unsqueeze(1)
        else:
            images = images.permute(0, 3, 1, 2).contiguous()
        sets[name] = images, torch.as_tensor(dataset.targets)
    return sets
