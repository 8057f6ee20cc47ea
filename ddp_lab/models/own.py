"""Construction of the model, which may be any module of the user's."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.nn.parameter import is_lazy

from ddp_lab.config.build import build
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.models.chain import Chain
from ddp_lab.models.torchvision_models import torchvision_model


def build_model(node: DictConfig | dict[str, Any], shape: Mapping[str, int]) -> nn.Module:
    """Call the class or function that `_target_` names and return the model.

    A plain nn.Sequential becomes a Chain of its modules, with the same parameter names, unless it uses a layer twice.

    Args:
        node: the config group `model`; `weights` and `init` are not passed.
        shape: the arguments that follow from the data: in_channels, image_size and num_classes. Only those are passed that are
            parameters of the class or function.

    Raises:
        ConfigError: the constructor fails, the result is not an nn.Module or has lazy parameters, or an option follows from the
            data.
    """
    target = node["_target_"]
    accepted = inspect.signature(get_object(target)).parameters
    values = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    options = {key: value for key, value in cast("dict[str, Any]", values).items() if key not in ("weights", "init")}
    passed = {name: value for name, value in shape.items() if name in accepted}
    for name in passed.keys() & options.keys():
        raise ConfigError(f"model.{name}={options[name]}: follows from the data, where it is {shape[name]}; leave it out")
    try:
        model = build(options, **passed)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"model._target_={target}: cannot be constructed: {describe_error(error)}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model._target_={target}: must return a torch.nn.Module, got {type(model).__name__}")
    if lazy := [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)]:
        raise ConfigError(
            f"model._target_={target}: {lazy[0]} of a lazy module has no shape yet. Call the model once at the end "
            f"of its constructor: self(torch.zeros(1, {shape['in_channels']}, {shape['image_size']}, {shape['image_size']}))"
        )
    if isinstance(model, nn.Sequential) and is_plain(model):
        blocks = {name: child for name, child in model.named_modules(remove_duplicate=False) if name and "." not in name}
        with suppress(ConfigError):
            return Chain((shape["in_channels"], shape["image_size"], shape["image_size"]), **blocks)
    return model


def is_plain(model: nn.Sequential) -> bool:
    """Return whether a model computes and changes its mode as an nn.Sequential does, so that a Chain can replace it."""
    return type(model).forward is nn.Sequential.forward and type(model).train is nn.Sequential.train


def key_of(node: DictConfig | dict[str, Any]) -> str:
    """Return the key and value by which the user has chosen the model, for messages."""
    of_torchvision = get_object(node["_target_"]) is torchvision_model
    return f"model.name={node['name']}" if of_torchvision else f"model._target_={node['_target_']}"


def require_chain(model: nn.Module, strategy: str, key: str) -> None:
    """Check that a strategy can cut the model into blocks.

    Args:
        strategy: name of the strategy, for the message.
        key: as from `key_of`.

    Raises:
        ConfigError: the model is no chain.
    """
    if not isinstance(model, Chain):
        problem = f"strategy={strategy}: needs a model made of blocks, but {key} is a {type(model).__name__}"
        if isinstance(model, nn.Sequential):
            why, remedy = "with methods of its own", "return an nn.Sequential without them"
            if is_plain(model):
                why, remedy = "that uses one layer in several places", "give each place a layer of its own"
            raise ConfigError(f"{problem} {why}. Use single, scratch, dp, ddp or fsdp, or {remedy}")
        if key.startswith("model.name="):
            raise ConfigError(f"{problem}. Use single, scratch, dp, ddp or fsdp, or a model of ddp_lab, such as model=resnet18")
        raise ConfigError(
            f"{problem}. Use single, scratch, dp, ddp or fsdp, return an nn.Sequential, or make a chain of the blocks:\n"
            "    from ddp_lab.models.chain import Chain\n"
            "    def blocks(in_channels, image_size, num_classes):\n"
            "        return Chain((in_channels, image_size, image_size), body=MyBody(in_channels), head=MyHead(num_classes))"
        )
