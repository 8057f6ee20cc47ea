"""A GPT (Radford et al. 2019, GPT-2) as a chain: embedding, blocks with causal attention, head.

    tokens [b, n] -> embed: [b, n, width] -> block0 -> ... -> block(depth - 1)
                  -> head: logits [b, n, vocabulary]

The blocks are those of the Vision Transformer (vit.py) with a mask, and have its plan for tensor
parallelism. The head may be tied to the embedding of the tokens, as in GPT-2: both are then the
same parameter (Press and Wolf 2017, arXiv:1608.05859).
"""

import math

import torch
from torch import nn

from ddp_lab.config.types import Count
from ddp_lab.models.chain import Chain
from ddp_lab.models.vit import EPS, Block, Norm, require_divisor

STD = 0.02  # of the initial weights, as in GPT-2


class TokenEmbed(nn.Module):
    """The sum of a learned vector for each token and one for each position.

    Args:
        vocabulary: number of tokens.
        context: largest number of positions.
        width: size of a vector.
    """

    def __init__(self, vocabulary: int, context: int, width: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(1, context, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights from N(0, 0.02^2), as GPT-2."""
        nn.init.normal_(self.tokens.weight, std=STD)
        nn.init.normal_(self.positions, std=STD)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [b, n, width] for int64 tokens, [b, n], of which n is at most the context.

        Under autocast they have its dtype, and so have all sums of the blocks, as under fully_shard
        with mixed precision. In float32 they took 6 % of a step of GPT-2.
        """
        sums = self.tokens(tokens) + self.positions[:, : tokens.size(1)]
        device = sums.device.type
        if sums.is_meta or not torch.is_autocast_enabled(device):  # meta has no autocast
            return sums
        return sums.to(torch.get_autocast_dtype(device))


class CausalBlock(Block):
    """A block of the Vision Transformer whose tokens see themselves and those before them only.

    Args:
        width: size of a token.
        heads: number of heads of the attention.
        depth: number of blocks of the model, by which the initial weights of the residual branches'
            ends are scaled.
        name: name of the block.
    """

    def __init__(self, width: int, heads: int, depth: int, name: str):
        self.depth = depth  # before the constructor of the base class, which draws the weights
        super().__init__(width, heads, 4 * width, 0.0, name)
        self.attn.causal = True

    def reset_parameters(self) -> None:
        """Draw the initial weights as GPT-2: N(0, 0.02^2).

        The deviation is 1 / sqrt(2 depth) of it at the end of a residual branch.
        """
        for norm in (self.norm1, self.norm2):
            norm.reset_parameters()
        ends = (self.attn.proj, self.fc2)
        for layer in (self.attn.q, self.attn.k, self.attn.v, self.fc1, *ends):
            nn.init.normal_(
                layer.weight, std=STD / math.sqrt(2 * self.depth) if layer in ends else STD
            )
            nn.init.zeros_(layer.bias)


class TokenHead(nn.Module):
    """The last normalization, and the linear layer that makes logits of every token.

    Args:
        width: size of a token.
        vocabulary: number of logits.

    Attributes:
        fusable_head: name of the layer, without a bias, whose outputs the block returns as they
            are, so that a loss may be computed in it (task.head_chunks).
    """

    fusable_head = "linear"

    def __init__(self, width: int, vocabulary: int):
        super().__init__()
        self.norm = Norm(width, EPS)
        self.linear = nn.Linear(width, vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights from N(0, 0.02^2)."""
        self.norm.reset_parameters()
        nn.init.normal_(self.linear.weight, std=STD)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits, [b, n, vocabulary], for the tokens, [b, n, width]."""
        return self.linear(self.norm(tokens))


def gpt(
    vocabulary: int, context: int, depth: Count, width: Count, heads: Count, tied: bool = False
) -> Chain:
    """Return the network, without dropout.

    With 12 blocks of width 768, GPT-2's vocabulary of 50,257 tokens and 1,024 positions it has
    163,037,184 parameters, and 124,439,808 with a tied head.

    Args:
        vocabulary: number of tokens.
        context: tokens of a sample.
        depth: number of blocks.
        width: size of a token.
        heads: number of attention heads; divides `width`.
        tied: whether the head's linear layer and the embedding of the tokens share one weight, as
            in GPT-2.

    Raises:
        ConfigError: `heads` does not divide `width`.
    """
    require_divisor("heads", heads, "width", width)
    blocks: dict[str, nn.Module] = {
        f"block{i}": CausalBlock(width, heads, depth, f"block{i}") for i in range(depth)
    }
    embed = TokenEmbed(vocabulary, context, width)
    head = TokenHead(width, vocabulary)
    if tied:
        head.linear.weight = embed.tokens.weight
    model = Chain((context,), embed=embed, **blocks, head=head)
    model.input_dtype = torch.int64
    return model
