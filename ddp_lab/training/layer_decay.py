"""`optimizer.layer_decay`: a smaller learning rate for each block before the last one."""

from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.blocks import blocks_of


def layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Return the factor of the learning rate of each parameter, by its first name.

    It is 1 for the last parameters of the model, and `decay` times smaller for each block before
    them, as in timm. What comes before the first block is one more layer, and so is what follows
    the last one, in the order in which the model registers its parameters.

    Args:
        model: the complete model.
        decay: the factor.

    Raises:
        ConfigError: the model has no blocks.
    """
    blocks = [*blocks_of(model)]
    depths: dict[str, int] = {}
    depth = 0
    for name, _ in model.named_parameters():
        within = [place for place, path in enumerate(blocks, 1) if name.startswith(f"{path}.")]
        if within:
            depth = within[0]
        elif depth == len(blocks):
            depth += 1
        depths[name] = depth
    order = sorted({*depths.values()})
    if len(blocks) < 2 or len(order) < 2:
        raise ConfigError(
            f"optimizer.layer_decay={decay:g}: {type(model).__name__} has no blocks, which would "
            "be the elements of an nn.Sequential or nn.ModuleList. Use optimizer.groups, with a "
            "lr_scale for each pattern of names"
        )
    return {name: decay ** (len(order) - 1 - order.index(each)) for name, each in depths.items()}
