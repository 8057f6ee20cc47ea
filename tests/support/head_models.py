"""Models and tasks of users whose last layer cannot compute the loss, for tests of head_chunks."""

import torch
from torch import nn

from ddp_lab.models.chain import Chain
from ddp_lab.models.gpt import gpt
from ddp_lab.tasks import Tokens


class Head(nn.Module):
    """The last block of a model: a linear layer, and what follows it.

    Args:
        vocabulary: number of logits.
        bias: whether the layer has one.
        largest: of the logits, which are bounded smoothly; None: they are returned as they are.
    """

    fusable_head = "out"

    def __init__(self, vocabulary: int, bias: bool = False, largest: float | None = None):
        super().__init__()
        self.out = nn.Linear(16, vocabulary, bias=bias)
        self.largest = largest

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.out(hidden)
        if self.largest is None:
            return logits
        return self.largest * torch.tanh(logits / self.largest)


def bigrams(
    vocabulary: int, context: int, bias: bool = False, largest: float | None = None
) -> Chain:
    """Return a Chain of an embedding and a head."""
    model = Chain(
        (context,), embed=nn.Embedding(vocabulary, 16), head=Head(vocabulary, bias, largest)
    )
    model.input_dtype = torch.int64
    return model


class Bigrams(nn.Module):
    """The same, but no Chain."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 16)
        self.out = nn.Linear(16, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(tokens))


def hooked(vocabulary: int, context: int) -> Chain:
    """Return a GPT whose head has a hook that looks at the logits."""
    model = gpt(vocabulary, context, depth=1, width=16, heads=2)
    model.head.register_forward_hook(lambda module, inputs, logits: None)
    return model


def doubled(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return twice the cross-entropy, with weights."""
    losses, weights = Tokens().loss_fn(outputs, targets)
    return 2 * losses, weights


class Squared(Tokens):
    """A loss of its own: the square of the cross-entropy."""

    def loss_fn(self, outputs, targets):
        losses, weights = super().loss_fn(outputs, targets)
        return losses.square(), weights


class Confident(Tokens):
    """A metric of the training steps, which needs their logits."""

    train_metrics = ("confidence",)

    def running_sums(self, outputs, targets):
        return [outputs.softmax(-1).amax(-1).sum()]


class Longest(Tokens):
    """A metric of evaluations only."""

    def sums(self, outputs, targets):
        return super().sums(outputs, targets) | {"rows": torch.tensor(float(len(outputs)))}


class Scaled(Tokens):
    """A task whose constructor has parameters of its own, and none of those of its base class."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.scale = scale


class Forgetful(Tokens):
    """A task whose constructor does not pass `head_chunks` on."""

    def __init__(self, loss=None, head_chunks: int = 1):
        super().__init__(loss)


class Passing(Tokens):
    """A task whose constructor passes on what it does not know."""

    def __init__(self, scale: float = 1.0, **options):
        super().__init__(**options)
        self.scale = scale
