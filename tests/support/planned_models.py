"""Models of attention and linear pairs as users write them, and plans of them."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ddp_lab.models.chain import Chain
from ddp_lab.models.vit import Block, vit

WIDTH = 16
# attention by heads, the linear pair by units
PAIRS = {
    "layers.*.attn.[qkv]": "column",
    "layers.*.attn.norm": "summed",
    "layers.*.attn.out": "row",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}
# the embedding by words, and the head by units
FULL = PAIRS | {"entry": "embedding_rowwise", "head": "colwise_rep"}


class HeadNorm(nn.Module):
    """RMSNorm of each head, whose weights all heads share."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, heads):
        return F.rms_norm(heads, self.weight.shape) * self.weight


class Attention(nn.Module):
    def __init__(self, heads: int, dropout: float, key_bias: bool):
        super().__init__()
        self.head_dim = WIDTH // heads
        self.dropout = dropout
        self.q = nn.Linear(WIDTH, WIDTH)
        # mathematically its bias has no gradient: it adds the same to all scores of a query
        self.k = nn.Linear(WIDTH, WIDTH, bias=key_bias)
        self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = HeadNorm(self.head_dim)

    def forward(self, tokens):
        q, k, v = (
            layer(tokens).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(self.norm(q), k, v, dropout_p=dropout)
        return self.out(input=mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, heads: int, dropout: float, dropout_of_heads: float, key_bias: bool):
        super().__init__()
        self.attn = Attention(heads, dropout_of_heads, key_bias)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens):
        tokens = tokens + self.drop(self.attn(F.layer_norm(tokens, (WIDTH,))))
        return tokens + self.drop(self.down(self.act(self.up(F.layer_norm(tokens, (WIDTH,))))))


class Pairs(nn.Module):
    """A classifier of images whose rows are tokens, or of texts if `words` is above 0."""

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int = 28,
        num_classes: int = 10,
        words: int = 0,
        tied: bool = False,
        heads: int = 4,
        dropout: float = 0.0,
        dropout_of_heads: float = 0.0,
        padding: int | None = None,
        key_bias: bool = True,
    ):
        super().__init__()
        if words:
            self.entry = nn.Embedding(words, WIDTH, padding_idx=padding)
        else:
            self.entry = nn.Linear(in_channels * image_size, WIDTH)
        self.layers = nn.ModuleList(
            Layer(heads, dropout, dropout_of_heads, key_bias) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, num_classes, bias=not tied)
        if tied:
            self.head.weight = self.entry.weight

    def forward(self, inputs):
        if inputs.dim() == 4:
            inputs = inputs.transpose(1, 2).flatten(2)
        tokens = self.entry(inputs)
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(tokens.mean(1))


class Planned(Pairs):
    """The same with a plan of its own, as models of transformers have one."""

    _tp_plan: ClassVar[dict[str, str]] = PAIRS | {"head": "colwise_gather_output"}


class Base(nn.Module):
    """A model whose config has the plan of the part that it names."""

    base_model_prefix = "inner"
    config = type("Config", (), {"base_model_tp_plan": PAIRS | {"entry": "embedding_rowwise"}})

    def __init__(self, **options):
        super().__init__()
        self.inner = Pairs(**options)

    def forward(self, inputs):
        return self.inner(inputs)


class WrongBlock(Block):
    """A block whose plan divides only the second layer of a pair."""

    tensor_parallel: ClassVar[dict[str, str]] = Block.tensor_parallel | {"fc1": "tokens"}


def wrong_vit(in_channels: int, image_size: int, num_classes: int) -> Chain:
    """Return a Vision Transformer with a block whose plan is wrong."""
    model = vit(
        in_channels,
        image_size,
        num_classes,
        depth=2,
        width=16,
        heads=4,
        mlp_ratio=2.0,
        patch_size=7,
        pool="mean",
        drop_path=0.0,
    )
    model.block1 = WrongBlock(16, 4, 32, 0.0, "block1")
    return model
