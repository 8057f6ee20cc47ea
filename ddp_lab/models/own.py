"""Construction of the model, which may be any module of the user's."""

import inspect
from collections.abc import Mapping
from typing import Any, cast

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ddp_lab.config.build import build
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain


def build_model(node: DictConfig | dict[str, Any], shape: Mapping[str, int]) -> nn.Module:
    """Call the class or function that `_target_` names and return the model.

    A plain nn.Sequential becomes a Chain of its modules, with the same parameter names.

    Args:
        node: the config group `model`; `weights` and `init` are not passed.
        shape: the arguments that follow from the data: in_channels, image_size and num_classes. Only those are passed that are
            parameters of the class or function.

    Raises:
        ConfigError: the result is not an nn.Module.
    """
    target = node["_target_"]
    accepted = inspect.signature(get_object(target)).parameters
    values = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    options = {key: value for key, value in cast("dict[str, Any]", values).items() if key not in ("weights", "init")}
    model = build(options, **{name: value for name, value in shape.items() if name in accepted})
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model._target_={target}: must return a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return Chain((shape["in_channels"], shape["image_size"], shape["image_size"]), **dict(model.named_children()))
    return model


def require_chain(model: nn.Module, strategy: str, target: str) -> None:
    """Check that a strategy can cut the model into blocks.

    Args:
        strategy: name of the strategy, for the message.
        target: the model's `_target_`, for the message.

    Raises:
        ConfigError: the model is no chain.
    """
    if not isinstance(model, Chain):
        raise ConfigError(
            f"strategy={strategy}: needs a model made of blocks, got {target}, which returns a {type(model).__name__}. "
            "Use single, scratch, dp, ddp or fsdp, return an nn.Sequential, or make a chain of the blocks:\n"
            "    from ddp_lab.models.chain import Chain\n"
            "    def blocks(in_channels, image_size, num_classes):\n"
            "        return Chain((in_channels, image_size, image_size), body=MyBody(in_channels), head=MyHead(num_classes))"
        )
