"""The model of a run that is only planned."""

import torch
from omegaconf import DictConfig
from torch import nn

from ddp_lab.advise.planned import PlannedRuntime
from ddp_lab.config.errors import ConfigError
from ddp_lab.data.dataset import Dataset
from ddp_lab.models.chain import Chain
from ddp_lab.models.make import build_model, key_of, make_model
from ddp_lab.models.trial import freeze_unused


def plan_model(cfg: DictConfig, dataset: Dataset) -> nn.Module:
    """Return the model on the meta device, or on the CPU if its constructor or its forward pass needs values.

    Raises:
        ConfigError: the model cannot be constructed, or does not accept the images.
    """
    node, shape = cfg.model, dataset.model_shape()
    runtime = PlannedRuntime(1, 1, cfg.precision, kind="cpu")
    try:
        with torch.device("meta"):
            model = build_model(node, shape)
        if not node["_target_"].startswith("ddp_lab.models.") or not isinstance(model, Chain):
            images = shape["in_channels"], shape["image_size"], shape["image_size"]
            freeze_unused(model, images, shape["num_classes"], runtime, key_of(node))
    except ConfigError:
        return make_model(node, shape, runtime, cfg.seed, with_weights=False).model
    return model
