"""The Vision Transformer (Dosovitskiy et al. 2020, arXiv:2010.11929) as a chain.

    images -> embed: tokens [b, n, width] -> block0 -> ... -> block(depth - 1) -> head: logits
    a block:  tokens + attention(norm1(tokens)), then tokens + fc2(gelu(fc1(norm2(tokens))))

`drop_path` may drop what a block adds to the tokens.
Query, key and value are separate layers, so that each can be divided by heads. A block whose layers
have a part of their units computes with the heads it has.
"""

import math
from typing import ClassVar, Literal, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import nn

from ddp_lab.config.errors import ConfigError, divisors
from ddp_lab.config.types import Count, Fraction, Positive
from ddp_lab.models.chain import Chain
from ddp_lab.models.drop_path import DropPath

EPS = 1e-6  # of the layer normalizations, as in torchvision's models


class Patches(nn.Conv2d):
    """The convolution of patches that do not overlap, as one matrix multiplication.

    cuDNN's outputs would be transposed tokens, and the gradient of its weight took a tenth of
    ViT-S/16's compiled step (H200).

    Attributes:
        computes_like: torch's class that computes the same, so that a strategy can divide this one.
    """

    computes_like = nn.Conv2d

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return [b, width, rows, columns], channels last, for images [b, c, height, width]."""
        size = self.weight.shape[-1]
        # [b, c, rows, size, columns, size]
        pixels = input.unflatten(2, (-1, size)).unflatten(4, (-1, size))
        pixels = pixels.permute(0, 2, 4, 1, 3, 5)
        weight = self.weight
        # channels last: its gradient must get the same strides, for DDP's buckets
        if weight.stride(1) == 1:
            pixels = pixels.permute(0, 1, 2, 4, 5, 3)
            weight = weight.permute(0, 2, 3, 1)
        return F.linear(pixels.flatten(3), weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class Norm(nn.LayerNorm):
    """A layer normalization whose outputs have the dtype of the inputs.

    Under autocast it computes in float32, and each layer after it would round the outputs for
    itself.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).to(input.dtype)


class Embed(nn.Module):
    """The patch embedding: one linear map of each patch of an image, and learned positions.

    With `class_token`, a learned token precedes those of the patches.
    """

    def __init__(
        self, in_channels: int, patches: int, patch_size: int, width: int, class_token: bool
    ):
        super().__init__()
        self.patches = Patches(in_channels, width, patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.empty(1, 1, width)) if class_token else None
        self.positions = nn.Parameter(torch.empty(1, patches + class_token, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights as torchvision's VisionTransformer does."""
        nn.init.trunc_normal_(
            self.patches.weight, std=math.sqrt(1 / self.patches.weight[0].numel())
        )
        nn.init.normal_(self.positions, std=0.02)
        for tensor in (self.patches.bias, self.class_token):
            if tensor is not None:
                nn.init.zeros_(tensor)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the tokens, [b, n, width], of the images, [b, in_channels, height, width]."""
        # All sums of a block keep the layout and the dtype of these tokens. Under autocast,
        # positions in float32 would make all of them float32; fully_shard rounds them, too.
        tokens = self.patches(images).flatten(2).transpose(1, 2).contiguous()
        if self.class_token is not None:
            tokens = torch.cat(
                [self.class_token.to(tokens.dtype).expand(len(tokens), -1, -1), tokens], 1
            )
        return tokens + self.positions.to(tokens.dtype)


class Attention(nn.Module):
    """Multi-head self-attention with separate layers for query, key and value.

    The number of heads divides the width.

    Attributes:
        causal: whether a token sees itself and those before it only.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.head_width = width // heads
        self.causal = False
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [b, n, width] for [b, n, width]."""
        # The number of heads follows from the width of q's output, which is smaller where the
        # layers are sharded.
        q, k, v = (
            layer(tokens).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            .transpose(1, 2)
            .flatten(2)
        )


class Block(nn.Module):
    """A transformer block whose normalizations precede the layers.

    Args:
        width, heads: as in `Attention`.
        hidden: units of the layer between fc1 and fc2.
        drop_path: probability with which each of the two residual branches is dropped in training.
        name: name of the block.

    Attributes:
        tensor_parallel: how tensor parallelism divides the layers; the words are those of
            strategies/block_plans.py.
    """

    tensor_parallel: ClassVar[dict[str, str]] = {
        "norm1": "tokens",
        "attn": "gather",
        "attn.q": "heads",
        "attn.k": "heads",
        "attn.v": "heads",
        "attn.proj": "row",
        "norm2": "tokens",
        "fc1": "column",
        "fc2": "row",
    }

    def __init__(self, width: int, heads: int, hidden: int, drop_path: float, name: str):
        super().__init__()
        self.norm1 = Norm(width, EPS)
        self.attn = Attention(width, heads)
        self.norm2 = Norm(width, EPS)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.drop1, self.drop2 = (
            DropPath(drop_path, f"{name}.drop{i}") if drop_path > 0 else nn.Identity()
            for i in (1, 2)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights as the authors' code does: Xavier's, attention biases at 0.

        The biases of fc1 and fc2 are drawn from N(0, 1e-12)
        (github.com/google-research/vision_transformer, models_vit.py).
        """
        for norm in (self.norm1, self.norm2):
            norm.reset_parameters()
        for layer in (self.attn.q, self.attn.k, self.attn.v, self.attn.proj, self.fc1, self.fc2):
            nn.init.xavier_uniform_(layer.weight)
            if layer in (self.fc1, self.fc2):
                nn.init.normal_(layer.bias, std=1e-6)
            else:
                nn.init.zeros_(layer.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [b, n, width] for [b, n, width]."""
        tokens = tokens + self.drop1(self.attn(self.norm1(tokens)))
        return tokens + self.drop2(self.fc2(F.gelu(self.fc1(self.norm2(tokens)))))


class Head(nn.Module):
    """The last normalization, a pooling of the tokens, and a linear layer for the logits.

    The pooling is the mean of all tokens or the first one, the class token.
    """

    def __init__(self, width: int, num_classes: int, pool: Literal["mean", "token"]):
        super().__init__()
        self.norm = Norm(width, EPS)
        self.linear = nn.Linear(width, num_classes)
        self.pool = pool
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the linear layer to zero, as the paper does: all logits are equal at first."""
        self.norm.reset_parameters()
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits, [b, num_classes], for the tokens, [b, n, width]."""
        tokens = self.norm(tokens)
        return self.linear(tokens.mean(1) if self.pool == "mean" else tokens[:, 0])


def require_divisor(option: str, value: int, size_name: str, size: int) -> None:
    """Raise a ConfigError unless an option of a model divides a size."""
    if size % value:
        raise ConfigError(
            f"model.{option}={value}: must divide the {size_name}, {size}; use {divisors(size)}"
        )


class ViTKeys(TypedDict):
    """The options of a Vision Transformer, as in the config; `vit` describes them."""

    depth: Count
    width: Count
    heads: Count
    mlp_ratio: Positive
    patch_size: Count
    pool: Literal["mean", "token"]
    drop_path: Fraction


def vit(in_channels: int, image_size: int, num_classes: int, **keys: Unpack[ViTKeys]) -> Chain:
    """Return the network. It has no dropout.

    With `pool=token`, `patch_size=16` and the sizes of ViT-B it is torchvision's `vit_b_16`, of
    86,567,656 parameters for 1000 classes.

    Args:
        in_channels, image_size, num_classes: follow from the data.
        depth: number of blocks.
        width: size of a token.
        heads: number of attention heads; divides `width`.
        mlp_ratio: units between the two linear layers of a block, as a multiple of `width`,
            rounded.
        patch_size: height and width of a patch, in pixels; divides the image size.
        pool: what the logits are computed from: the mean of all tokens, or a class token (token).
        drop_path: probability with which the last block's residual branches are dropped in a
            training step; it grows linearly from 0 in the first block (stochastic depth).

    Raises:
        ConfigError: `heads` does not divide `width`, or `patch_size` the image size; or `mlp_ratio`
            gives no unit.
    """
    depth = keys["depth"]
    width = keys["width"]
    heads = keys["heads"]
    patch_size = keys["patch_size"]
    pool = keys["pool"]
    require_divisor("heads", heads, "width", width)
    require_divisor("patch_size", patch_size, "image size", image_size)

    units = round(width * keys["mlp_ratio"])
    if units == 0:
        raise ConfigError(
            f"model.mlp_ratio={keys['mlp_ratio']}: gives blocks without units for width={width}; "
            f"use at least {1 / width:.3g}"
        )

    patches = (image_size // patch_size) ** 2
    embed = Embed(in_channels, patches, patch_size, width, class_token=pool == "token")
    blocks: dict[str, nn.Module] = {}
    for i in range(depth):
        rate = keys["drop_path"] * i / max(1, depth - 1)
        blocks[f"block{i}"] = Block(width, heads, units, rate, f"block{i}")

    return Chain(
        (in_channels, image_size, image_size),
        embed=embed,
        **blocks,
        head=Head(width, num_classes, pool),
    )
