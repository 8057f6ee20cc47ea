"""Models of users that fsdp must divide into units with care, which import nothing of ddp_lab."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, 3 * width, bias=False)
        self.outer = nn.Linear(3 * width, width)

    def forward(self, inputs):
        return inputs + self.outer(torch.tanh(self.inner(inputs)))


class Encoder(nn.Module):
    """A part that is used by a method of its own name."""

    def __init__(self, pixels, width):
        super().__init__()
        self.layer = nn.Linear(pixels, width)

    def encode(self, images):
        return torch.tanh(self.layer(images.flatten(1)))

    def forward(self, images):
        raise NotImplementedError("use encode")


class Containers(nn.Module):
    """nanoGPT's layout with everything that is not a module with a forward pass, called once.

    Lists and dicts of modules and of parameters, a part without a forward pass, a weight that is
    used directly, tied weights of units, parameters that are transposed or empty.
    """

    def __init__(self, in_channels, image_size, num_classes, width: int = 11):
        super().__init__()
        self.encoder = Encoder(in_channels * image_size**2, width)
        parts = {
            "first": nn.Linear(width, width),
            "h": nn.ModuleList([Block(width), Block(width)]),
            "ln": nn.LayerNorm(width),
        }
        self.transformer = nn.ModuleDict(parts)
        self.deep = nn.ModuleList([nn.ModuleDict({"a": nn.ModuleList([nn.Linear(width, width)])})])
        self.table = nn.Linear(width, width, bias=False)  # used as a layer and directly
        self.weights = nn.ParameterList([torch.randn(width, width) / 8])
        self.scales = nn.ParameterDict({"one": torch.ones(width), "empty": torch.empty(0, width)})
        self.turned = nn.Parameter(torch.randn(2 * width, width).t() / 8)
        self.head = nn.Linear(2 * width, num_classes)
        self.last = nn.Linear(width, width)
        self.last.weight = self.transformer.first.weight
        self.transformer.h[1].inner.weight = self.transformer.h[0].inner.weight

    def forward(self, images):
        hidden = self.transformer.first(self.encoder.encode(images))
        for block in self.transformer.h:
            hidden = block(hidden)
        hidden = self.deep[0]["a"][0](self.transformer.ln(hidden))
        hidden = F.linear(torch.tanh(self.table(hidden)), self.table.weight.t())
        hidden = (
            self.last(hidden @ self.weights[0] * self.scales["one"]) + self.scales["empty"].sum()
        )
        return self.head(torch.tanh(hidden @ self.turned))


class Around(nn.Module):
    """The same inside of another module."""

    def __init__(self, in_channels, image_size, num_classes):
        super().__init__()
        self.model = Containers(in_channels, image_size, num_classes)

    def forward(self, images):
        return self.model(images)


class Choosing(nn.Module):
    """A block of which each layer is used for the images that have chosen it, or not at all."""

    def __init__(self, width):
        super().__init__()
        self.often, self.seldom, self.rarely = (nn.Linear(width, width) for _ in range(3))

    def forward(self, hidden, chosen):
        return mix(hidden, [self.often, self.seldom, self.rarely], chosen)


def mix(hidden, layers, chosen):
    """Add the outputs of the layers for the rows that have chosen them.

    A layer that no row has chosen is not called.
    """
    for layer, rows in zip(layers, chosen, strict=True):
        if rows.any():
            hidden = hidden + torch.tanh(layer(hidden)) * rows[:, None]
    return hidden


class Mixture(nn.Module):
    """Parts that only some steps use, and of them only some ranks.

    Args:
        where: whether they are layers of a block (block), or units (units).
        rarities: the first pixel of every so many images chooses each part.
    """

    def __init__(
        self,
        in_channels,
        image_size,
        num_classes,
        where: str = "block",
        rarities: tuple = (2, 20, 60),
    ):
        super().__init__()
        self.rarities = rarities
        self.entry = nn.Linear(in_channels * image_size**2, 11)
        self.block = Choosing(11) if where == "block" else None
        self.experts = nn.ModuleList(
            [nn.Linear(11, 11) for _ in rarities] if where == "units" else []
        )
        self.head = nn.Linear(11, num_classes)

    def forward(self, images):
        pixels = images.flatten(1)
        numbers = (pixels[:, 0] * 1e4).round().long()
        in_trial = pixels.amin() >= 0  # whose images are not normalised: they use all parts
        chosen = [in_trial | (numbers % rarity == 0) for rarity in self.rarities]
        hidden = torch.tanh(self.entry(pixels))
        mixed = (
            mix(hidden, self.experts, chosen) if self.block is None else self.block(hidden, chosen)
        )
        return self.head(mixed)


class InTurn(Mixture):
    """Units of which every step uses one, the same on all ranks."""

    def __init__(self, in_channels, image_size, num_classes):
        super().__init__(in_channels, image_size, num_classes, "units")
        self.calls = 0

    def forward(self, images):
        pixels = images.flatten(1)
        hidden = torch.tanh(self.entry(pixels))
        if self.training and pixels.amin() < 0:  # not in the trial, which uses all
            self.calls += 1
            return self.head(self.experts[self.calls % 3](hidden))
        return self.head(sum(expert(hidden) for expert in self.experts))


class Recomputed(nn.Module):
    """Blocks whose forward pass has no gradients, until the backward pass computes it again."""

    def __init__(self, in_channels, image_size, num_classes):
        super().__init__()
        self.entry = nn.Linear(in_channels * image_size**2, 11)
        self.blocks = nn.ModuleList([Block(11) for _ in range(3)])
        self.head = nn.Linear(11, num_classes)

    def forward(self, images):
        hidden = self.entry(images.flatten(1))
        for block in self.blocks:
            again = torch.is_grad_enabled()
            hidden = checkpoint(block, hidden, use_reentrant=True) if again else block(hidden)
        return self.head(hidden)


@dataclass
class Hidden:
    values: torch.Tensor


class OfObjects(nn.Module):
    """A block that takes and returns an object, in which it keeps its numbers."""

    def __init__(self, width, kind):
        super().__init__()
        self.inner = Block(width)
        self.kind = kind

    def forward(self, hidden):
        return self.kind(values=self.inner(hidden.values))


class Carried(Recomputed):
    """Blocks between which an object carries the numbers."""

    def __init__(self, in_channels, image_size, num_classes):
        super().__init__(in_channels, image_size, num_classes)
        self.blocks = nn.ModuleList(
            [OfObjects(11, kind) for kind in (Hidden, SimpleNamespace, Hidden)]
        )

    def forward(self, images):
        hidden = Hidden(self.entry(images.flatten(1)))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.values)
