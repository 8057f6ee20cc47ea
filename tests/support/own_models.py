"""Models as users write them, which import nothing of ddp_lab."""

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, inputs):
        return inputs + torch.relu(self.inner(inputs))


class Plain(nn.Module):
    """A parameter of its own, blocks in a ModuleList, and an argument not set by the data."""

    def __init__(self, in_channels, image_size, num_classes, hidden: int = 16):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.entry = nn.Linear(in_channels * image_size**2, hidden)
        self.blocks = nn.ModuleList([Residual(hidden), Residual(hidden)])
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, inputs):
        hidden = torch.tanh(self.entry(self.scale * inputs.flatten(1)))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def sequential(num_classes):
    """A function that takes only one of the arguments that follow from the data."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16, 24),
        nn.Tanh(),
        nn.Linear(24, num_classes),
    )


class Last(nn.Module):
    """A layer of which the block returns a view, as an LSTM's last output."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)

    def forward(self, inputs):
        return self.inner(inputs).unflatten(1, (2, -1))[:, -1]


def changed_views(in_channels, image_size, num_classes):
    """A block's output is a view, which the next block changes in place."""
    first = nn.Linear(in_channels * image_size**2, 16)
    last = nn.Linear(16, num_classes)
    return nn.Sequential(nn.Flatten(), first, Last(16), nn.ReLU(inplace=True), last)


class SomeSteps(Plain):
    """A model that uses one layer in every other step only."""

    def __init__(self, in_channels, image_size, num_classes):
        super().__init__(in_channels, image_size, num_classes)
        self.sometimes = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, inputs):
        self.calls += self.training
        hidden = torch.tanh(self.entry(inputs.flatten(1)))
        return self.head(self.sometimes(hidden) if self.calls % 2 else hidden)


class Experts(Plain):
    """Each image goes through some of three layers.

    Through the last one in few batches, and mostly on one rank only.

    The images of the trial, which are not normalised, go through all of them.
    """

    rarities = 2, 12, 40

    def __init__(self, in_channels, image_size, num_classes):
        super().__init__(in_channels, image_size, num_classes)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in self.rarities)
        del self.blocks

    def forward(self, images):
        hidden = torch.tanh(self.entry(self.scale * images.flatten(1)))
        total = hidden
        for expert, rarity in zip(self.experts, self.rarities, strict=True):
            (rows,) = self.choose(images.flatten(1), rarity).nonzero(as_tuple=True)
            if len(rows):
                total = total.index_add(0, rows, torch.tanh(expert(hidden[rows])))
        return self.head(total)

    def choose(self, pixels, rarity):
        return self.is_chosen(pixels, rarity) | (pixels.amin(1) >= 0)

    def is_chosen(self, pixels, rarity):
        return (pixels[:, 0] * 1e4).round().long() % rarity == 0


class RareExperts(Experts):
    """The same, but only images with equal pixels go through them: no random ones."""

    def choose(self, pixels, rarity):
        has_equal_pixels = (pixels.sort().values.diff() == 0).any(1)
        return self.is_chosen(pixels, rarity) & has_equal_pixels


class Masked(nn.Module):
    """A layer with a mask whose rows are the same memory, and a transposed table."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        mask = (torch.arange(width) % 3 > 0).float()
        self.register_buffer("mask", mask.expand(4, width))
        self.register_buffer("table", torch.linspace(-1, 1, 4 * width).view(width, 4).t())

    def forward(self, inputs):
        return torch.tanh(self.inner(inputs)) * self.mask[0] + self.table[1]


class Stretched(Masked):
    """The same with parameters that are transposed, or every second column of a larger tensor."""

    def __init__(self, width):
        super().__init__(width)
        self.turned = nn.Parameter(torch.randn(2 * width, width).t())
        self.gaps = nn.Parameter(torch.randn(2 * width, 2 * width)[:, ::2])

    def forward(self, inputs):
        return torch.tanh(super().forward(inputs) @ self.turned @ self.gaps / 8)


def masked(in_channels, image_size, num_classes):
    layers = nn.Linear(in_channels * image_size**2, 16), Masked(16), nn.Linear(16, num_classes)
    return nn.Sequential(nn.Flatten(), *layers)


def stretched(in_channels, image_size, num_classes):
    layers = nn.Linear(in_channels * image_size**2, 16), Stretched(16), nn.Linear(16, num_classes)
    return nn.Sequential(nn.Flatten(), *layers)


class WaitingLayer(nn.Linear):
    """A layer whose forward pass waits for the device."""

    def forward(self, inputs):
        return super().forward(inputs / max(1.0, inputs.abs().max().item()))


def waiting_blocks(in_channels, image_size, num_classes):
    """Blocks, of which the third one waits for the device."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_channels * image_size**2, 24),
        WaitingLayer(24, 24),
        nn.Linear(24, num_classes),
    )


class Freezing(nn.Sequential):
    """A Sequential that keeps its dropout layer in evaluation mode."""

    def __init__(self, in_channels, image_size, num_classes):
        super().__init__(
            nn.Flatten(), nn.Dropout(0.5), nn.Linear(in_channels * image_size**2, num_classes)
        )

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


def one_layer(in_channels, image_size, num_classes):
    """One layer for two places."""
    layer = nn.Linear(16, 16)
    layers = (
        nn.Linear(in_channels * image_size**2, 16),
        layer,
        nn.Tanh(),
        layer,
        nn.Linear(16, num_classes),
    )
    return nn.Sequential(nn.Flatten(), *layers)


def one_weight(in_channels, image_size, num_classes):
    """Two layers in different places that share their weight, and one activation for both."""
    first = nn.Linear(in_channels * image_size**2, 16)
    tanh = nn.Tanh()
    model = nn.Sequential(nn.Flatten(), first, nn.Linear(16, 16), tanh, nn.Linear(16, 16), tanh)
    model[4].weight = model[2].weight
    return model.append(nn.Linear(16, num_classes))


class SeveralTypes(nn.Module):
    """Layers in float32, float64 and complex numbers."""

    def __init__(self, in_channels, image_size, num_classes):
        super().__init__()
        self.entry = nn.Linear(in_channels * image_size**2, 16)
        self.precise = nn.Linear(16, 16, dtype=torch.float64)
        self.phase = nn.Linear(16, 16, dtype=torch.complex64)
        self.head = nn.Linear(16, num_classes)

    def forward(self, images):
        hidden = self.precise(self.entry(images.flatten(1)).tanh().double()).float()
        return self.head(self.phase(hidden.to(torch.complex64)).abs())


class Attention(nn.Module):
    """A stock attention, which reads the weight of its out_proj, and an MLP."""

    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, tokens):
        tokens = tokens.to(self.mlp[0].weight.dtype)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return tokens + self.mlp(tokens)


class Tokens(nn.Module):
    """The rows of an image, projected to tokens of 16 values."""

    def __init__(self, image_size):
        super().__init__()
        self.layer = nn.Linear(image_size, 16)

    def forward(self, images):
        return self.layer(images[:, 0])


def attention(image_size, num_classes):
    """Blocks of stock attention."""
    encoder = nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0.0, activation="gelu", batch_first=True
    )
    layers = nn.Flatten(), nn.Linear(16 * image_size, 16), nn.Linear(16, num_classes)
    return nn.Sequential(Tokens(image_size), Attention(16), encoder, *layers)


class Standardized(nn.Linear):
    """A linear layer with a forward pass of its own."""

    def forward(self, input):
        return nn.functional.linear(
            input, (self.weight - self.weight.mean()) / self.weight.std(), self.bias
        )


def special_layers(in_channels, image_size, num_classes):
    """Layers that are computed in another way than torch's plain ones."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, stride=3),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)),
        nn.Tanh(),
        nn.Flatten(),
        Standardized(4 * (image_size // 3 - 4) ** 2, num_classes),
    )


class Twice(nn.Module):
    """Two convolutions, which may share a weight, and BatchNorm."""

    def __init__(self, channels, shared):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        if shared:
            self.second.weight = self.first.weight
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, inputs):
        return self.norm(self.second(self.first(inputs).relu()))


def twice(in_channels, image_size, num_classes, shared: bool = True):
    return nn.Sequential(
        Twice(in_channels, shared),
        nn.Flatten(),
        nn.Linear(in_channels * image_size**2, num_classes),
    )


class Wrong(Plain):
    """A model that cannot be trained, or not under every strategy, for the reason `how`."""

    def __init__(self, in_channels, image_size, num_classes, how):
        super().__init__(in_channels, image_size, 2 if how == "classes" else num_classes)
        self.how = how
        if how == "frozen":
            self.requires_grad_(False)
        elif how == "scalar":
            self.scale = nn.Parameter(torch.ones(()))
        elif how == "head":
            self.head = nn.Linear(17, num_classes)
        elif how == "lazy":
            self.spare = nn.LazyLinear(16)
        elif how == "raises":
            raise KeyError("a bug")

    def forward(self, inputs):
        if self.how == "only float32" and torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no bf16")
        if self.how == "pixels":
            raise ValueError(f"{inputs.size(3)} pixels are too few")
        logits = super().forward(inputs)
        pair = self.how == "pair" or (self.how == "pair when evaluated" and not self.training)
        return (logits, inputs) if pair else logits


def no_module(num_classes):
    return num_classes


instance = nn.Flatten()


def finetuned(in_channels, image_size, num_classes, trained: str = "head"):
    """A model of which one layer is trained, with parameters that are never used."""
    model = Plain(in_channels, image_size, num_classes).requires_grad_(False)
    model.get_submodule(trained).requires_grad_(True)
    model.spare = nn.Linear(2, 2)
    return model


class ReadsValues(Plain):
    """A model that the meta device cannot run, with a layer that is used in training only."""

    def __init__(self, in_channels, image_size, num_classes):
        super().__init__(in_channels, image_size, num_classes)
        self.training_only = nn.Linear(1, 1)
        self.spare = nn.Linear(1, 1)

    def forward(self, inputs):
        if inputs.sum().item() > 1e9:
            return inputs
        logits = super().forward(inputs)
        return logits + self.training_only(logits.new_ones(1)) if self.training else logits


def vision_transformer(image_size, num_classes):
    """A small Vision Transformer of torchvision."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size, 7, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=num_classes
    )


class Telling(Plain):
    """A model that prints how float32 matrix multiplications round on its device."""

    def forward(self, inputs):
        square = torch.eye(256, device=inputs.device) + 1e-5  # TF32 rounds 1 + 1e-5 to 1
        error = (square @ square - square.double() @ square.double()).abs().max().item()
        print(
            f"float32_matmul={torch.get_float32_matmul_precision()}, error "
            f"{'small' if error < 1e-6 else 'large'}"
        )
        return super().forward(inputs)


def segmenter(in_channels, num_classes):
    """Return logits for every pixel."""
    body = nn.Sequential(nn.Conv2d(in_channels, 8, 3, padding=1), nn.Tanh())
    return nn.Sequential(body, nn.Conv2d(8, num_classes, 3, padding=1))


def regressor(input_shape, dropout: float = 0.5):
    """Return two numbers; half of the layer in between is dropped."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(*input_shape, 32), nn.Tanh(), nn.Dropout(dropout)), nn.Linear(32, 2)
    )


class Lazy(nn.Module):
    """Lazy layers, of which one is used in training only."""

    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.LazyConv2d(4, 3, stride=3), nn.LazyBatchNorm2d(), nn.Tanh())
        self.dropout = nn.Dropout(0.1)
        self.training_only = nn.LazyLinear(16)
        self.entry = nn.LazyLinear(16)
        self.norm = nn.LazyBatchNorm1d()
        self.head = nn.LazyLinear(num_classes)

    def forward(self, images):
        hidden = self.norm(self.entry(self.dropout(self.body(images).flatten(1))))
        return self.head(hidden + self.training_only(hidden) if self.training else hidden)


def lazy_blocks(num_classes):
    """Blocks with lazy layers."""
    body = nn.Sequential(nn.LazyConv2d(4, 3, stride=3), nn.Tanh())
    return nn.Sequential(
        body, nn.Flatten(), nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(num_classes)
    )


def eager_blocks(in_channels, image_size, num_classes):
    """The same blocks with layers that are not lazy."""
    body = nn.Sequential(nn.Conv2d(in_channels, 4, 3, stride=3), nn.Tanh())
    layers = nn.Linear(4 * (image_size // 3) ** 2, 16), nn.Tanh(), nn.Linear(16, num_classes)
    return nn.Sequential(body, nn.Flatten(), *layers)


class InPlace(nn.Module):
    """Layers whose outputs are changed in place, in a module that is no chain.

    Activations and squeeze-and-excitation change them.
    """

    def __init__(self, in_channels, image_size, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.squeeze = nn.Conv2d(8, 8, 1)
        self.hidden = nn.Linear(8 * 16, 16)
        self.head = nn.Linear(16, num_classes)

    def forward(self, images):
        hidden = nn.functional.silu(self.conv(images), inplace=True)
        hidden = hidden * self.squeeze(hidden.mean((2, 3), keepdim=True)).sigmoid_()
        hidden = nn.functional.adaptive_avg_pool2d(hidden, 4).flatten(1)
        return self.head(self.hidden(hidden).relu_())


class DirectWeights(nn.Module):
    """Layers whose weights are used elsewhere, one of them never called, and one used as usual."""

    def __init__(self, in_channels, image_size, num_classes):
        super().__init__()
        self.entry = nn.Linear(in_channels * image_size**2, 16)
        self.inner = nn.Linear(16, 16)
        self.back = nn.Linear(16, 16)
        self.usual = nn.Linear(16, 16)
        self.head = nn.Linear(16, num_classes)

    def forward(self, images):
        hidden = self.entry(images.flatten(1)).tanh_()
        hidden = nn.functional.linear(hidden, self.inner.weight, self.inner.bias)
        hidden = self.back(hidden).tanh_() @ self.back.weight.t()
        return self.head(self.usual(hidden.to(self.usual.weight.dtype)))


class Compared(nn.Module):
    """A model of two inputs, which are passed by name."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.head = nn.Linear(4, num_classes)

    def forward(self, left, right):
        return {"logits": self.head(torch.tanh(self.layer(left) - self.layer(right)))}


class Reader(nn.Module):
    """Texts with a mask, which are passed by name."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, num_classes)

    def forward(self, ids, mask):
        hidden = self.tokens(ids) * mask[..., None] / mask.sum(1)[:, None, None].clamp(min=1)
        return {"logits": self.head(torch.tanh(self.mix(hidden.sum(1))))}


class Sum(nn.Module):
    """Sum over the second dimension."""

    def forward(self, hidden):
        return hidden.sum(1)


def read_ids(num_classes: int) -> nn.Module:
    """Texts as one tensor, in blocks; padding counts as nothing."""
    embedding = nn.Embedding(11, 6, padding_idx=0)
    mix = nn.Linear(6, 6, bias=False)
    return nn.Sequential(embedding, mix, Sum(), nn.Tanh(), nn.Linear(6, num_classes))


class Product(nn.Module):
    """A model of two inputs by place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, left, right):
        return self.layer(left * right)


class Norm(nn.Module):
    """A model whose outputs are a dict without logits."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.tokens = nn.Embedding(11, num_classes)

    def forward(self, ids, mask):
        return {"scores": self.tokens(ids).mean(1)}
