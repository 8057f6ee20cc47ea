"""model=gpt and model=gpt2"""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from by_block import draw_by_block
from settings import CONTEXT, DEPTH, DRAWS_BY_BLOCK, HEADS, TIED, VOCABULARY, WIDTH
from torch import nn

INIT = 0.02  # deviation of the initial weights, as in GPT-2


class Embed(nn.Module):
    """The sum of a learned vector for each token and one for each position."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.empty(1, CONTEXT, WIDTH))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.tokens.weight, std=INIT)
        nn.init.normal_(self.positions, std=INIT)

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions[:, : tokens.size(1)]


class Block(nn.Module):
    """Attention, and two linear layers, each after a normalization and added to its input."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH)
        self.reset_parameters()

    def reset_parameters(self):
        """Draw the weights; those at the end of a residual branch are smaller."""
        for layer in (self.q, self.k, self.v, self.fc1, self.proj, self.fc2):
            is_end = layer in (self.proj, self.fc2)
            nn.init.normal_(layer.weight, std=INIT / math.sqrt(2 * DEPTH) if is_end else INIT)
            nn.init.zeros_(layer.bias)

    def forward(self, tokens):
        normed = self.norm1(tokens)
        q, k, v = (
            layer(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        tokens = tokens + self.proj(heads.transpose(1, 2).flatten(2))
        return tokens + self.fc2(F.gelu(self.fc1(self.norm2(tokens))))


class Head(nn.Module):
    """The last normalization, and the linear layer for the logits."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.linear = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.linear.weight, std=INIT)

    def forward(self, tokens):
        return self.linear(self.norm(tokens))


def build_model() -> nn.Module:
    """Return a GPT (Radford et al. 2019), without dropout: tokens to logits of the next ones."""
    blocks = {f"block{i}": Block() for i in range(DEPTH)}
    embed = Embed()
    head = Head()
    if TIED:
        head.linear.weight = embed.tokens.weight
    model = nn.Sequential(OrderedDict(embed=embed, **blocks, head=head))
    if DRAWS_BY_BLOCK:
        draw_by_block(model)
    return model
