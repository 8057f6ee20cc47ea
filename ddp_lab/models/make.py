"""Construction of the complete model of a run, which may be any module of the user's: built, given weights, and tried once."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ddp_lab.config.build import build
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.models.chain import Chain
from ddp_lab.models.initial_weights import KEY, InitialWeights
from ddp_lab.models.lazy import materialise
from ddp_lab.models.memory import give_own_memory
from ddp_lab.models.module_hooks import hook_of, require_no_hook
from ddp_lab.models.torchvision_models import find_weights, rename, torchvision_model
from ddp_lab.models.trial import Trial, freeze_unused
from ddp_lab.models.weights import match_weights, read
from ddp_lab.world.planned import PlannedRuntime
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


def make_model(
    node: DictConfig | dict[str, Any],
    shape: Mapping[str, Any],
    runtime: Runtime,
    seed: int,
    trial: Trial,
    with_weights: bool = True,
) -> BuiltModel:
    """Return the model. Collective if weights of torchvision may have to be downloaded.

    Args:
        node: the config group `model`.
        shape: the arguments that follow from the data (`Dataset.model_shape`).
        seed: the run's seed; torch's random state is set by it.
        trial: what the model is tried with, unless it is one of ddp_lab's.
        with_weights: whether to load the file `node.weights`.

    Raises:
        ConfigError: the model cannot be made, the weights do not fit it, or it cannot be trained on these data.
    """
    torch.manual_seed(seed)
    target, weights = node["_target_"], node.get("weights")
    of_torchvision, notes = get_object(target) is torchvision_model, list[str]()
    if node.get("init") == "by_block":
        with torch.device("meta"):
            model = build_model(node, shape, trial.inputs)
        initial_weights = InitialWeights(model, seed)
    else:
        model, initial_weights = build_model(node, shape, trial.inputs), None
    if weights is not None and with_weights:
        if of_torchvision:
            state = rename(read(runtime.agree("weights", partial(find_weights, node["name"], weights), per_node=True)))
        else:
            state = read(weights)
        given, found = match_weights(model.state_dict(), state, shape.get("num_classes", 0), f"model.weights={weights}")
        notes += found
        if initial_weights is None:
            model.load_state_dict(given, strict=False)
        else:
            initial_weights.set_weights(given)
    if of_torchvision or not target.startswith("ddp_lab.") or trial.of_all:  # ddp_lab's own train all parameters
        notes += freeze_unused(model, trial, runtime, key_of(node))
    if isinstance(model, Chain) and not trial.inputs.is_floating_point():
        model.input_dtype = trial.inputs.dtype
    return BuiltModel(model, initial_weights, notes)


def model_to_plan(node: DictConfig, shape: Mapping[str, Any], precision: str, seed: int, trial: Trial) -> nn.Module:
    """Return the model of a planned run on the meta device, or on the CPU if its constructor or its forward pass needs values.

    Raises:
        ConfigError: the model cannot be constructed, or does not accept the images.
    """
    runtime = PlannedRuntime(1, 1, precision, kind="cpu")
    try:
        with torch.device("meta"):
            model = build_model(node, shape, trial.inputs)
        if not node["_target_"].startswith("ddp_lab.models.") or not isinstance(model, Chain) or trial.of_all:
            freeze_unused(model, trial, runtime, key_of(node))
    except ConfigError:
        return make_model(node, shape, runtime, seed, trial, with_weights=False).model
    return model


def build_model(node: DictConfig | dict[str, Any], shape: Mapping[str, Any], inputs: torch.Tensor | None = None) -> nn.Module:
    """Call the class or function that `_target_` names and return the model. Its lazy layers get their parameters.

    A plain nn.Sequential becomes a Chain of its modules, with the same parameter names, unless it uses a layer twice.

    Args:
        node: the config group `model`; `weights` and `init` are not passed.
        shape: the arguments that follow from the data, for example in_channels and num_classes. Only those are passed that are
            parameters of the class or function.
        inputs: samples, for lazy layers; None: those that `shape` describes.

    Raises:
        ConfigError: the constructor fails, the result is not an nn.Module or cannot process the samples, or an option follows
            from the data.
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
        on_meta = isinstance(error, RuntimeError) and torch.get_default_device().type == "meta"
        where = f" on the meta device, which has no values, as {KEY} needs (use model.init=default)" if on_meta else ""
        raise ConfigError(f"model._target_={target}: cannot be constructed{where}: {describe_error(error)}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model._target_={target}: must return a torch.nn.Module, got {type(model).__name__}")
    dtype = torch.int64 if "vocabulary" in shape else None
    example = torch.zeros(2, *shape_of(shape), dtype=dtype) if inputs is None else inputs
    materialise(model, example, f"model._target_={target}")
    give_own_memory(model, f"model._target_={target}")
    return as_chain(model, shape_of(shape))


def as_chain(model: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
    """Return a plain nn.Sequential as a Chain of its modules, unless it uses a layer twice; any other module as it is.

    One with hooks stays as it is, too: they would be lost.
    """
    kind = type(model)
    if hook_of(model):
        return model
    if isinstance(model, nn.Sequential) and (kind.forward, kind.train) == (nn.Sequential.forward, nn.Sequential.train):
        blocks = {name: child for name, child in model.named_modules(remove_duplicate=False) if name and "." not in name}
        with suppress(ConfigError):
            return Chain(input_shape, **blocks)
    return model


def shape_of(shape: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a sample's input, by default that of an image."""
    return tuple(shape.get("input_shape") or (shape["in_channels"], shape["image_size"], shape["image_size"]))


def key_of(node: DictConfig | dict[str, Any]) -> str:
    """Return the key and value by which the user has chosen the model, for messages."""
    of_torchvision = get_object(node["_target_"]) is torchvision_model
    return f"model.name={node['name']}" if of_torchvision else f"model._target_={node['_target_']}"


def require_chain(model: nn.Module, strategy: str, key: str) -> None:
    """Check that a strategy can cut the model into blocks, and that the model has no hook of its own.

    Args:
        strategy: name of the strategy, for the message.
        key: as from `key_of`.

    Raises:
        ConfigError: the model is no chain, or has a hook.
    """
    if isinstance(model, nn.Sequential):
        require_no_hook(model, strategy)
    if not isinstance(model, Chain):
        raise ConfigError(
            f"strategy={strategy}: needs a model made of blocks, but {key} is a {type(model).__name__}. Use single, scratch, "
            "dp, ddp, fsdp or tp, a model of ddp_lab, such as model=resnet18, or return an nn.Sequential without repeated "
            "layers and methods of its own, or a Chain of blocks (docs/your-own.md)"
        )
