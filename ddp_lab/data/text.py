"""`data=text`: the bytes of a file as tokens, cut into samples of as many tokens as the model has positions."""

import socket
from pathlib import Path

import numpy as np
import torch

from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.config.types import Count
from ddp_lab.data.dataset import Dataset, InMemory

BYTES = 256  # the size of the vocabulary


class Text:
    """The bytes of a file. Sample i has the tokens i * context to (i + 1) * context, and as targets those that follow each.

    Args:
        root: the file.
        context: tokens of a sample.
    """

    def __init__(self, root: str, context: Count):
        self.root, self.context = Path(root), context

    def load(self) -> Dataset:
        """Read the file.

        Raises:
            NodeError: it cannot be read.
            ConfigError: it is too short.
        """
        try:
            tokens = torch.from_numpy(np.fromfile(self.root, np.uint8))
        except OSError as error:
            raise NodeError(
                f"data.root={self.root}: cannot be read on {socket.gethostname()} ({error.strerror}). Use the path of a file"
            ) from None
        inputs, targets = cut(tokens, self.context, str(self.root))
        return Dataset(InMemory(inputs, targets), None, [str(byte) for byte in range(BYTES)])


def cut(tokens: torch.Tensor, context: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples of bytes, and the bytes that follow each: both uint8 [samples, context].

    Raises:
        ConfigError: there are too few bytes for two samples. The message calls them `name`.
    """
    number = (len(tokens) - 1) // context
    if number < 2:
        raise ConfigError(
            f"data.context={context}: {name} has {len(tokens):,} bytes, and two samples or more need {2 * context + 1:,}. Use "
            "a smaller context or more text"
        )
    end = number * context
    return tokens[:end].view(number, context), tokens[1 : end + 1].view(number, context)
