"""Every model of transformers that has a head for the task, from its config.

Its class is that of transformers' Auto classes: AutoModelForCausalLM for tokens, of which each has
the next one as its target, AutoModelForImageClassification for images, and
AutoModelForSequenceClassification for samples that are dicts or have other shapes.
"""

import difflib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.config.packages import import_package

T = TypeVar("T")


def transformers_model(
    name: str,
    input_shape: Sequence[int] = (),
    num_classes: int | None = None,
    vocabulary: int | None = None,
    architecture: str | None = None,
    **sizes: Any,
) -> nn.Module:
    """Return a model of transformers with random weights, under its own parameter names.

    Its head has the classes of the data. It keeps no cache, which is no output of a training step.

    Args:
        name: path of a directory with a config.json; or a model type of transformers, such as
            llama; or a config class, such as LlamaConfig.
        input_shape, num_classes, vocabulary: follow from the data.
        architecture: name of the model's class in transformers; null: that of the Auto class.
        sizes: keys of the config, for example hidden_size=64.

    Raises:
        ConfigError: the package is missing, there is no such config or class, the config has no
            such key, or its model has no head for these data.
    """
    transformers = import_package("transformers", "hf", "model=transformers")
    is_image = len(input_shape) == 3
    from_data = {"vocab_size": vocabulary}
    if vocabulary is None:  # the classes of tokens are the vocabulary
        from_data["num_labels"] = num_classes
    if is_image:
        from_data |= {"num_channels": input_shape[0], "image_size": input_shape[2]}
    from_data = {key: value for key, value in from_data.items() if value is not None}
    for key in from_data.keys() & sizes.keys():
        raise ConfigError(
            f"model.{key}={sizes[key]}: follows from the data, where it is {from_data[key]}; leave "
            "it out"
        )

    config = find_config(transformers, name, sizes)
    for key, value in from_data.items():
        if hasattr(config, key):  # one that the data determine
            setattr(config, key, value)
    config.use_cache = False
    positions = getattr(config, "max_position_embeddings", None)
    if vocabulary is not None and isinstance(positions, int) and input_shape[0] > positions:
        raise ConfigError(
            f"model.name={name}: has {positions} positions, but a sample has {input_shape[0]} "
            f"tokens. Use shorter ones, or +model.max_position_embeddings={input_shape[0]}"
        )

    kind = find_class(transformers, architecture, is_image, vocabulary is not None)
    try:
        make = getattr(kind, "from_config", kind)
        return make(config)
    except Exception as error:
        # it goes on with the names of all classes
        reason = describe_error(error).partition(" Model type should be")[0]
        raise ConfigError(
            f"model.name={name}: {kind.__name__} cannot be constructed of {type(config).__name__}: "
            f"{reason} Use other sizes, or set model.architecture to another class of transformers"
        ) from None


def find_config(transformers: Any, name: str, sizes: Mapping[str, Any]) -> Any:
    """Return the config that `model.name` names. Nothing is downloaded, and no code of it is run.

    Args:
        transformers: the package.
        name: as in `transformers_model`.
        sizes: keys of the config in place of its own values.

    Raises:
        ConfigError: there is none, or it has no such key.
    """
    types = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if Path(name).is_dir():
        try:
            config = transformers.AutoConfig.from_pretrained(
                name, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"model.name={name}: has no config.json of transformers: {reason}"
            ) from None
        require_keys(config, sizes)
        for key, value in sizes.items():
            setattr(config, key, value)
        return config

    kind = getattr(transformers, name, None) if name.endswith("Config") else None
    if name in types:
        kind = types[name]
    if not isinstance(kind, type) or not issubclass(kind, transformers.PretrainedConfig):
        close = difflib.get_close_matches(name, [*types], n=3) or ["llama", "gpt2", "vit"]
        raise ConfigError(
            f"model.name={name}: must be a directory with a config.json, a model type of "
            f"transformers, for example {', '.join(close)}, or a config class, for example "
            "LlamaConfig. Nothing is downloaded: `hf download NAME --local-dir DIR` does so"
        )
    require_keys(kind(), sizes)
    # by its constructor, which computes some sizes from others
    return kind(**sizes)


def require_keys(config: Any, keys: Iterable[str]) -> None:
    """Raise a ConfigError if a config does not have one of the keys."""
    known = [*config.to_dict(), *config.attribute_map]
    for key in keys:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=3)
            hint = f", for example {', '.join(close)}" if close else ""
            raise ConfigError(
                f"model.{key}: is not one of the keys of {type(config).__name__}; use one of "
                f"them{hint}"
            )


def find_class(
    transformers: Any, architecture: str | None, of_images: bool, of_tokens: bool
) -> Any:
    """Return the class of the model, for what follows from the data.

    Raises:
        ConfigError: transformers has no class `architecture`.
    """
    if architecture is not None:
        kind = getattr(transformers, architecture, None)
        if not isinstance(kind, type):
            raise ConfigError(
                f"model.architecture={architecture}: must be a class of transformers, for example "
                "LlamaForCausalLM"
            )
        return kind
    if of_tokens:
        return transformers.AutoModelForCausalLM
    if of_images:
        return transformers.AutoModelForImageClassification
    return transformers.AutoModelForSequenceClassification


def rename_stored(model: Any, stored: Mapping[str, T]) -> dict[str, T]:
    """Return tensors of a directory by the names that they have in a model of transformers.

    Files keep the names of the release that wrote the first one of their kind. What a model
    computes of several tensors keeps its name, and is then reported as missing.

    Args:
        model: of transformers, complete.
        stored: by their names in the files.
    """
    mapping = importlib.import_module("transformers.conversion_mapping")
    loading = importlib.import_module("transformers.core_model_loading")

    expected = model.state_dict()
    renamings = [
        each
        for each in mapping.get_model_conversion_mapping(model)
        if isinstance(each, loading.WeightRenaming)
    ]
    renamed: dict[str, T] = {}
    for name, tensor in stored.items():
        new_name = name
        if name not in expected:
            prefix = model.base_model_prefix
            new_name, _ = loading.rename_source_key(name, renamings, [], prefix, expected)
        renamed[new_name] = tensor
    return renamed
