"""Construction of the complete model of a run: built, begun from a file of weights, and tried once."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig
from torch import nn

from ddp_lab.models.own import build_model
from ddp_lab.models.torchvision_models import find_weights, rename, torchvision_model
from ddp_lab.models.trial import freeze_unused
from ddp_lab.models.vit import vit
from ddp_lab.models.vit_weights import from_torchvision
from ddp_lab.models.weights import load_weights, read
from ddp_lab.world.runtime import Runtime


def make_model(
    node: DictConfig | dict[str, Any], shape: Mapping[str, int], runtime: Runtime, with_weights: bool = True
) -> tuple[nn.Module, list[str]]:
    """Return the model on the CPU, the same on every rank if their random states are, and notes about it for the log.

    Collective if weights of torchvision may have to be downloaded.

    Args:
        node: the config group `model`.
        shape: in_channels, image_size and num_classes of the data.
        with_weights: whether to load the file `node.weights`.

    Raises:
        ConfigError: the model cannot be made, the weights do not fit it, or it cannot be trained on these images.
    """
    model, target, weights = build_model(node, shape), node["_target_"], node.get("weights")
    of_torchvision, notes = get_object(target) is torchvision_model, list[str]()
    if weights is not None and with_weights:
        if of_torchvision:
            state = rename(read(runtime.agree("weights", partial(find_weights, node["name"], weights), per_node=True)))
        else:
            state = read(weights)
            if get_object(target) is vit:
                state = from_torchvision(state)
        notes += load_weights(model, state, shape["num_classes"], f"model.weights={weights}")
    if of_torchvision or not target.startswith("ddp_lab."):  # ddp_lab's own models train all their parameters
        images = shape["in_channels"], shape["image_size"], shape["image_size"]
        key = f"model.name={node['name']}" if of_torchvision else f"model._target_={target}"
        notes += freeze_unused(model, images, shape["num_classes"], runtime, key)
    return model, notes
