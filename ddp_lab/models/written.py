"""Layers of torch that write to their weights in a forward pass."""

from torch import nn

from ddp_lab.config.errors import ConfigError


def require_no_max_norm(model: nn.Module, strategy: str) -> None:
    """Check that no embedding has a largest norm.

    An embedding with `max_norm` scales the rows down that it looks up. Ranks with other samples
    would scale other rows, so that their weights differ; and what is written to gathered weights is
    lost.

    Args:
        model: the complete model.
        strategy: its name, for the message.

    Raises:
        ConfigError: an embedding has one.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(
                f"strategy={strategy}: the layer {name or 'of the model'} has "
                f"max_norm={module.max_norm:g}: it changes its weights in a forward pass, on each "
                "rank those of its own samples, so that the ranks would have different weights. "
                "Use max_norm=None, or strategy=single"
            )
