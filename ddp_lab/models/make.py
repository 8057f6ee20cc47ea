"""Construction of the complete model of a run: built, begun from a file of weights, and tried once."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from hydra.utils import get_object
from omegaconf import DictConfig
from torch import nn

from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.models.chain import Chain
from ddp_lab.models.initial_weights import KEY, InitialWeights
from ddp_lab.models.own import build_model, key_of
from ddp_lab.models.torchvision_models import find_weights, rename, torchvision_model
from ddp_lab.models.trial import freeze_unused
from ddp_lab.models.vit import vit
from ddp_lab.models.vit_weights import from_torchvision
from ddp_lab.models.weights import match_weights, read
from ddp_lab.world.runtime import Runtime


class BuiltModel(NamedTuple):
    """The complete model of a run.

    Attributes:
        model: on the CPU, the same on every rank; on the meta device with `init=by_block`.
        initial_weights: of its blocks, with `init=by_block`; else None, because the model has its weights.
        notes: lines for the log.
    """

    model: nn.Module
    initial_weights: InitialWeights | None
    notes: list[str]

    def set_weights(self, state: dict[str, torch.Tensor]) -> None:
        """Give the complete model these weights in place of its initial ones, before a strategy places it."""
        if self.initial_weights is None:
            self.model.load_state_dict(state)
        else:
            self.initial_weights.give(state)


def make_model(
    node: DictConfig | dict[str, Any], shape: Mapping[str, int], runtime: Runtime, seed: int, with_weights: bool = True
) -> BuiltModel:
    """Return the model. Collective if weights of torchvision may have to be downloaded.

    Args:
        node: the config group `model`.
        shape: in_channels, image_size and num_classes of the data.
        seed: the run's seed; torch's random state is set by it.
        with_weights: whether to load the file `node.weights`.

    Raises:
        ConfigError: the model cannot be made, the weights do not fit it, or it cannot be trained on these images.
    """
    torch.manual_seed(seed)
    target, weights = node["_target_"], node.get("weights")
    of_torchvision, notes = get_object(target) is torchvision_model, list[str]()
    if node.get("init") == "by_block":
        model, initial_weights = begin_on_meta(node, shape, seed)
    else:
        model, initial_weights = build_model(node, shape), None
    if weights is not None and with_weights:
        if of_torchvision:
            state = rename(read(runtime.agree("weights", partial(find_weights, node["name"], weights), per_node=True)))
        else:
            state = read(weights)
            if get_object(target) is vit:
                state = from_torchvision(state)
        given, found = match_weights(model.state_dict(), state, shape["num_classes"], f"model.weights={weights}")
        notes += found
        if initial_weights is None:
            model.load_state_dict(given, strict=False)
        else:
            initial_weights.give(given)
    if of_torchvision or not target.startswith("ddp_lab."):  # ddp_lab's own models train all their parameters
        images = shape["in_channels"], shape["image_size"], shape["image_size"]
        notes += freeze_unused(model, images, shape["num_classes"], runtime, key_of(node))
    return BuiltModel(model, initial_weights, notes)


def begin_on_meta(node: DictConfig | dict[str, Any], shape: Mapping[str, int], seed: int) -> tuple[Chain, InitialWeights]:
    """Return the model on the meta device, and its initial weights by block. The arguments are as above.

    Raises:
        ConfigError: the model is not made of blocks, or cannot be constructed or drawn that way.
    """
    try:
        with torch.device("meta"):
            model = build_model(node, shape)
    except ConfigError as error:
        if not isinstance(error.__cause__, RuntimeError):
            raise
        raise ConfigError(
            f"{KEY}: {node['_target_']} cannot be constructed on the meta device, which has shapes and no values: "
            f"{describe_error(error.__cause__)}. Use model.init=default"
        ) from None
    if not isinstance(model, Chain):
        raise ConfigError(
            f"{KEY}: needs a model made of blocks, got {node['_target_']}, which returns a {type(model).__name__}. Use "
            "model.init=default, or return an nn.Sequential or a Chain of blocks"
        )
    return model, InitialWeights(model, seed)
