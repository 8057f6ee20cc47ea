"""Every model of timm, with random weights."""

import difflib
from typing import Any

from torch import nn

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.config.packages import import_package


def timm_model(
    in_channels: int, image_size: int, num_classes: int, name: str, **options: Any
) -> nn.Module:
    """Return a model of timm for classification, with its own initial weights and names.

    Models that are made for one image size, such as Vision Transformers, are made for that of the
    data.

    Args:
        in_channels, image_size, num_classes: follow from the data.
        name: name of the model, as in timm.list_models.
        options: further arguments of timm.create_model.

    Raises:
        ConfigError: the package is missing, timm has no such model, or the model does not accept
            the options, the image size or the channels.
    """
    timm = import_package("timm", "timm", "model=timm")
    if not timm.is_model(name):
        names = timm.list_models()
        close = difflib.get_close_matches(name, names, n=3) or ["convnext_tiny"]
        raise ConfigError(
            f"model.name={name}: must be one of timm's {len(names)} models, for example "
            f"{', '.join(close)}; timm.list_models() lists them"
        )
    if options.get("pretrained") or options.get("checkpoint_path"):
        raise ConfigError(
            "model.pretrained, model.checkpoint_path: nothing is downloaded, and pickles could run "
            "code. Use model.weights=PATH, with a file or a directory of safetensors"
        )

    pretrained = timm.models.get_pretrained_cfg(name)
    if pretrained is not None and pretrained.fixed_input_size:
        options = {"img_size": image_size, **options}
    try:
        return timm.create_model(name, num_classes=num_classes, in_chans=in_channels, **options)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        described = "".join(f", {key}={value}" for key, value in options.items())
        raise ConfigError(
            f"model.name={name}: does not accept {image_size}x{image_size} pixels of "
            f"{count(in_channels, 'channel')}{described}: {' '.join(str(error).split())}"
        ) from None
