"""model=vit and its other sizes"""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from by_block import draw_by_block
from settings import (
    DEPTH,
    DRAWS_BY_BLOCK,
    HEADS,
    HIDDEN,
    IMAGE_SIZE,
    IN_CHANNELS,
    NUM_CLASSES,
    PATCH_SIZE,
    POOL,
    WIDTH,
)
from torch import nn


class Embed(nn.Module):
    """One linear map of each patch of an image, and learned positions."""

    def __init__(self):
        super().__init__()
        patches = (IMAGE_SIZE // PATCH_SIZE) ** 2
        self.patches = nn.Conv2d(IN_CHANNELS, WIDTH, PATCH_SIZE, stride=PATCH_SIZE)
        if POOL == "token":
            patches += 1
            self.class_token = nn.Parameter(torch.empty(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.empty(1, patches, WIDTH))
        self.reset_parameters()

    def reset_parameters(self):
        inputs = self.patches.weight[0].numel()
        nn.init.trunc_normal_(self.patches.weight, std=math.sqrt(1 / inputs))
        nn.init.normal_(self.positions, std=0.02)
        nn.init.zeros_(self.patches.bias)
        if POOL == "token":
            nn.init.zeros_(self.class_token)

    def forward(self, images):
        # [n, channels, rows, size, columns, size]: a convolution as one matrix multiplication
        pixels = images.unflatten(2, (-1, PATCH_SIZE)).unflatten(4, (-1, PATCH_SIZE))
        pixels = pixels.permute(0, 2, 4, 1, 3, 5).flatten(3)
        tokens = F.linear(pixels, self.patches.weight.flatten(1), self.patches.bias).flatten(1, 2)
        if POOL == "token":
            tokens = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], 1)
        return tokens + self.positions


class Block(nn.Module):
    """Attention, and two linear layers, each after a normalization and added to its input."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.fc1 = nn.Linear(WIDTH, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, WIDTH)
        self.reset_parameters()

    def reset_parameters(self):
        for layer in (self.q, self.k, self.v, self.proj, self.fc1, self.fc2):
            nn.init.xavier_uniform_(layer.weight)
            if layer in (self.fc1, self.fc2):
                nn.init.normal_(layer.bias, std=1e-6)
            else:
                nn.init.zeros_(layer.bias)

    def forward(self, tokens):
        normed = self.norm1(tokens)
        q, k, v = (
            layer(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v)
        tokens = tokens + self.proj(heads.transpose(1, 2).flatten(2))
        return tokens + self.fc2(F.gelu(self.fc1(self.norm2(tokens))))


class Head(nn.Module):
    """The last normalization, a pooling of the tokens, and a linear layer for the logits."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.linear = nn.Linear(WIDTH, NUM_CLASSES)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, tokens):
        tokens = self.norm(tokens)
        if POOL == "token":
            return self.linear(tokens[:, 0])
        else:
            return self.linear(tokens.mean(1))


def build_model() -> nn.Module:
    """Return a Vision Transformer (Dosovitskiy et al. 2020): images to logits."""
    embed = Embed()
    blocks = {f"block{i}": Block() for i in range(DEPTH)}
    model = nn.Sequential(OrderedDict(embed=embed, **blocks, head=Head()))
    if DRAWS_BY_BLOCK:
        draw_by_block(model)
    return model
