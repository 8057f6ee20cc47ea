"""The model of a run that is only predicted."""

import torch
from omegaconf import DictConfig
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.samples import Dataset
from ddp_lab.estimate.planned import PlannedRuntime
from ddp_lab.models.chain import Chain
from ddp_lab.models.make import make_model
from ddp_lab.models.own import build_model, key_of
from ddp_lab.models.trial import freeze_unused, meta_copy, without_gradient


def plan_model(cfg: DictConfig, dataset: Dataset) -> nn.Module:
    """Return the model on the meta device, or on the CPU if its constructor or its forward pass needs values.

    Raises:
        ConfigError: the model cannot be constructed, or does not accept the images.
    """
    node, shape = cfg.model, dataset.model_shape()
    runtime = PlannedRuntime(1, 1, cfg.precision)
    runtime.device = torch.device("cpu")  # where a model that reads values is tried
    try:
        with torch.device("meta"):
            model = build_model(node, shape)
        if not node["_target_"].startswith("ddp_lab.models.") or not isinstance(model, Chain):
            images = shape["in_channels"], shape["image_size"], shape["image_size"]
            freeze_unused(model, images, shape["num_classes"], runtime, key_of(node))
    except ConfigError:
        return make_model(node, shape, runtime, cfg.seed, with_weights=False).model
    return model


def reads_values(model: nn.Module, dataset: Dataset) -> bool:
    """Return whether the host waits for values in the forward pass, as for `.item()`. Such a step cannot be captured."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return False
    try:
        images = torch.empty(2, *dataset.train.shape, device="meta")
        without_gradient(meta_copy(model), images, len(dataset.classes))
    except Exception:
        return True
    return False
