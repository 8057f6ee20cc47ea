"""data=digits"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor


def load_data() -> dict[str, tuple[Tensor, Tensor]]:
    """Return images, uint8 [n, 1, 28, 28], and digits: 1,437 to train with, 360 to test with."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).view(-1, 1, 8, 8).float() / 16
    images = F.interpolate(images, size=28, mode="bilinear", align_corners=False)
    images = (images * 255).round().to(torch.uint8)
    targets = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order.split([1437, 360])
    return {"train": (images[train], targets[train]), "test": (images[test], targets[test])}
