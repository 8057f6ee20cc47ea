"""Every classification model of torchvision, and torchvision's own weights for it."""

import difflib
import re
import socket
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.world.process import default_timeout


def torchvision_model(
    in_channels: int, image_size: int, num_classes: int, name: str, **options: Any
) -> nn.Module:
    """Return a classification model of torchvision, with its own initial weights and names.

    For grey images the weights of the first convolution are summed over its three channels: the
    model then computes what it would for three equal channels. GoogLeNet and Inception have no
    auxiliary classifiers. Vision Transformers and MaxVit are made for images of `image_size`.

    Args:
        in_channels, image_size, num_classes: follow from the data; images have 1 or 3 channels.
        name: name of the model, as in torchvision.models.list_models.
        options: further arguments of the model's constructor.

    Raises:
        ConfigError: torchvision has no such model, or the model does not accept the options, the
            image size or the channels.
    """
    from torchvision import models  # takes 1.5 s, so only these models import it

    names = models.list_models(module=models)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3) or ["resnet50"]
        raise ConfigError(
            f"model.name={name}: must be one of torchvision's {len(names)} classification models, "
            f"for example {', '.join(close)}; "
            "torchvision.models.list_models(module=torchvision.models) lists them"
        )

    if in_channels not in (1, 3):
        raise ConfigError(
            f"model.name={name}: expects images of 3 channels, or of 1 (grey), got {in_channels}. "
            "Use such images, or model=own with a function that replaces the first convolution"
        )

    try:
        model = models.get_model(
            name, weights=None, num_classes=num_classes, **defaults(name, image_size) | options
        )
    except (TypeError, ValueError, AssertionError) as error:
        options_text = f"{image_size}x{image_size} pixels" + "".join(
            f", {key}={value}" for key, value in options.items()
        )
        raise ConfigError(
            f"model.name={name}: does not accept {options_text}: {' '.join(str(error).split())}"
        ) from None

    if in_channels == 1:
        conv = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
        conv.in_channels, conv.weight = 1, nn.Parameter(conv.weight.detach().sum(1, keepdim=True))
    return model


def defaults(name: str, image_size: int) -> dict[str, Any]:
    """Return the arguments of a model's constructor by the image size, or unlike torchvision's."""
    if name.startswith("vit_"):
        return {"image_size": image_size}
    if name.startswith("maxvit"):
        return {"input_size": (image_size, image_size)}
    if name in ("googlenet", "inception_v3"):  # torchvision warns if `init_weights` is not given
        return {"aux_logits": False, "init_weights": True}
    return {}


def find_weights(name: str, weights: str) -> str:
    """Return the file that `model.weights` names: a path, or torchvision's weights.

    The latter are downloaded if they are missing.

    Args:
        name: name of the model.
        weights: path of a file, or a name such as IMAGENET1K_V1.

    Raises:
        ConfigError: there are no such weights.
        NodeError: they cannot be downloaded to this machine.
    """
    from torchvision.models import get_model_weights

    if Path(weights).exists():
        return weights
    known = get_model_weights(name).__members__
    if weights not in known:
        raise ConfigError(
            f"model.weights={weights}: must be the path of a file, or one of torchvision's weights "
            f"for {name}: {', '.join(known)}"
        )
    return download(
        known[weights].url, Path(torch.hub.get_dir()) / "checkpoints", f"model.weights={weights}"
    )


def download(url: str, folder: Path, key: str) -> str:
    """Return the path of a file whose name ends with the first digits of its SHA-256.

    It is downloaded if it is missing.

    A file with another hash does not get this name, and is not parsed.

    Args:
        folder: torch.hub's cache.
        key: the start of the message.

    Raises:
        NodeError: the file cannot be downloaded, or has another hash.
    """
    path = folder / url.rpartition("/")[2]
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            # torch.hub sets none: an unresponsive server would stall all ranks
            with default_timeout(60):
                torch.hub.download_url_to_file(
                    url, str(path), torch.hub.HASH_REGEX.findall(path.name)[-1], progress=False
                )
    except (OSError, RuntimeError) as error:
        raise NodeError(
            f"{key}: is not on {socket.gethostname()} and could not be downloaded "
            f"({' '.join(str(error).split())}). Download {url} elsewhere and copy it to {path}, or "
            "set model.weights to a file"
        ) from None
    return str(path)


def rename(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adapt the names in torchvision's files to its models.

    These are those of DenseNet's layers; auxiliary classifiers are left out.
    """
    return {
        re.sub(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)", r"\1\2", name): tensor
        for name, tensor in state.items()
        if not re.match(r"(AuxLogits|aux[12])\.", name)
    }
