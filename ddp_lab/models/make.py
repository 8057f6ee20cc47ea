"""The complete model of a run, any module of the user's: built, given weights, tried once."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.models.chain import Chain, tied_parameters
from ddp_lab.observe.log import print_if_slow
from ddp_lab.world.runtime import Runtime

if TYPE_CHECKING:
    from ddp_lab.data.trees import Tree
    from ddp_lab.models.initial_weights import InitialWeights, Weights
    from ddp_lab.models.trial import Trial

TRANSFORMERS = "ddp_lab.models.transformers_models.transformers_model"
TORCHVISION = "ddp_lab.models.torchvision_models.torchvision_model"


class ModelSpec(NamedTuple):
    """How the model of a run is constructed.

    Attributes:
        make: constructs it.
        target: name of its class or function.
        name: of the model of another library; None: it is none of them.
        input_shape: of a sample, for example [channels, height, width].
        of_tokens: whether inputs are numbers of tokens.
        num_classes: of the data; 0: there are none.
        weights: file or directory of weights or, of torchvision's models, a name; None: the initial
            ones are drawn.
        by_block: whether the initial weights are drawn for each block by itself.
        weights_except: names of parameters, or patterns of names, that keep their initial weights.
    """

    make: Callable[[], object]
    target: str
    name: str | None
    input_shape: tuple[int, ...]
    of_tokens: bool
    num_classes: int
    weights: str | None
    by_block: bool
    weights_except: tuple[str, ...] = ()

    @property
    def is_stored(self) -> bool:
        """Whether the weights are in a directory, of which each rank reads its own part."""
        return self.weights is not None and Path(self.weights).is_dir()

    @property
    def key(self) -> str:
        """The key and value by which the user has chosen the model, for messages."""
        return f"model._target_={self.target}" if self.name is None else f"model.name={self.name}"

    @property
    def is_own(self) -> bool:
        """Whether it is one of ddp_lab's, which train all parameters."""
        return self.name is None and self.target.startswith("ddp_lab.")


class BuiltModel(NamedTuple):
    """The complete model of a run.

    Attributes:
        model: on the CPU, the same on every rank; on the meta device with `init=by_block`, and
            with weights in a directory.
        initial_weights: of a model on the meta device; None: the model has its weights.
        notes: lines for the log.
        unused: names of the parameters that the trial has not used.
    """

    model: nn.Module
    initial_weights: "Weights | None"
    notes: list[str]
    unused: frozenset[str] = frozenset()


def make_model(
    spec: ModelSpec, runtime: Runtime, seed: int, trial: "Trial | None", with_weights: bool = True
) -> BuiltModel:
    """Return the model. Collective if weights of torchvision may have to be downloaded.

    Args:
        spec: how it is constructed.
        runtime: the ranks.
        seed: the run's seed; torch's random state is set by it.
        trial: what the model is tried with; None: it is not tried, because it is one of ddp_lab's,
            for classification.
        with_weights: whether to load `spec.weights`.

    Raises:
        ConfigError: the model cannot be made, the weights do not fit it, or it cannot be trained on
            these data.
    """
    torch.manual_seed(seed)
    with print_if_slow("making the model: drawing or reading its weights", runtime.is_main):
        built, inputs = make_untried(spec, runtime, seed, trial, with_weights)
    model = built.model
    notes = built.notes
    unused = frozenset[str]()
    if trial is not None and (not spec.is_own or trial.of_all):
        from ddp_lab.models.trial import freeze_unused

        with print_if_slow("trying the model: a step of two samples", runtime.is_main):
            unused, trial_notes = freeze_unused(model, trial, runtime, spec.key)
        notes += trial_notes

    if (
        isinstance(model, Chain)
        and isinstance(inputs, torch.Tensor)
        and not inputs.is_floating_point()
    ):
        model.input_dtype = inputs.dtype
    return built._replace(notes=notes, unused=unused)


def make_untried(
    spec: ModelSpec, runtime: Runtime, seed: int, trial: "Trial | None", with_weights: bool
) -> "tuple[BuiltModel, Tree]":
    """Return the model with its weights, and the samples with which it is tried, or None.

    Arguments and errors as in `make_model`.
    """
    notes = list[str]()
    initial_weights: Weights | None = None
    drawn = None
    inputs = None if trial is None else trial.inputs
    is_stored = spec.is_stored and with_weights
    if spec.by_block:
        from ddp_lab.models.initial_weights import InitialWeights

        with torch.device("meta"):
            model = build_model(spec, inputs)
        drawn = InitialWeights(model, seed)
        initial_weights = drawn
    elif is_stored and not spec.weights_except:
        from ddp_lab.models.stored_weights import build_without_data

        model = build_without_data(partial(build_model, spec, inputs))
    else:
        # also what keeps its initial weights, which the constructor draws with all others
        model = build_model(spec, inputs)

    if is_stored:
        from ddp_lab.models.stored_weights import StoredWeights

        stored, notes = stored_weights(spec, model)
        if drawn is not None:
            drawn.set_weights(stored)
        else:
            initial_weights = StoredWeights(model, stored)
    elif spec.weights is not None and with_weights:
        notes += load_weights(spec, spec.weights, model, drawn, runtime)
    return BuiltModel(model, initial_weights, notes), inputs


def stored_weights(spec: ModelSpec, model: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """Return the weights in the directory of a model by name, not read yet, and notes for the log.

    Args:
        spec: with the directory.
        model: complete, with or without data.

    Raises:
        ConfigError: they are not those of the model.
    """
    from ddp_lab.models.stored_weights import open_directory, with_tied_names
    from ddp_lab.models.weights import match_weights

    assert spec.weights is not None
    stored = open_directory(Path(spec.weights))
    if spec.target == TRANSFORMERS:
        from ddp_lab.models.transformers_models import rename_stored

        stored = rename_stored(model, stored)
    stored = with_tied_names(stored, tied_parameters(model))
    key = f"model.weights={spec.weights}"
    return match_weights(model.state_dict(), stored, 0, key, spec.weights_except)


def load_weights(
    spec: ModelSpec,
    weights: str,
    model: nn.Module,
    initial_weights: "InitialWeights | None",
    runtime: Runtime,
) -> list[str]:
    """Give a model, or its initial weights, those of a file; return notes for the log.

    Arguments as in `make_model`.
    """
    from ddp_lab.models.weights import match_weights, read

    if spec.target == TORCHVISION:
        assert spec.name is not None
        from ddp_lab.models.torchvision_models import find_weights, rename

        find = partial(find_weights, spec.name, weights)
        state = rename(read(runtime.broadcast_from_rank0("weights", find, per_node=True)))
    else:
        state = read(weights)

    key = f"model.weights={weights}"
    fitting, notes = match_weights(
        model.state_dict(), state, spec.num_classes, key, spec.weights_except
    )
    if initial_weights is None:
        model.load_state_dict(fitting, strict=False)
    else:
        initial_weights.set_weights(fitting)
    return notes


def build_model(spec: ModelSpec, inputs: "Tree" = None) -> nn.Module:
    """Construct a model. Its lazy layers get their parameters.

    A plain nn.Sequential becomes a Chain of its modules, with the same parameter names, unless it
    uses a layer twice.

    Args:
        spec: how it is constructed.
        inputs: samples, for lazy layers; None: those that `spec` describes.

    Raises:
        ConfigError: the constructor fails, or the result is not an nn.Module or cannot process the
            samples.
    """
    key = f"model._target_={spec.target}"
    try:
        model = spec.make()
    except ConfigError:
        raise
    except Exception as error:
        where = ""
        if isinstance(error, RuntimeError) and torch.get_default_device().type == "meta":
            from ddp_lab.models.initial_weights import KEY

            where = (
                f" on the meta device, which has no values, as {KEY} needs (use model.init=default)"
            )
        raise ConfigError(
            f"{key}: cannot be constructed{where}: {describe_error(error)}"
        ) from error

    if not isinstance(model, nn.Module):
        raise ConfigError(f"{key}: must return a torch.nn.Module, got {type(model).__name__}")
    if spec.is_own:  # neither lazy nor expanded
        return as_chain(model, spec.input_shape)

    from ddp_lab.models.lazy import materialise
    from ddp_lab.models.memory import give_own_memory

    dtype = torch.int64 if spec.of_tokens else None
    example = torch.zeros(2, *spec.input_shape, dtype=dtype) if inputs is None else inputs
    materialise(model, example, key)
    give_own_memory(model, key)
    return as_chain(model, spec.input_shape)


def as_chain(model: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
    """Return a plain nn.Sequential as a Chain of its modules, else the module as it is.

    A Sequential that uses a layer twice is also returned as it is.

    One with hooks stays as it is, too: they would be lost.
    """
    kind = type(model)
    plain = (nn.Sequential.forward, nn.Sequential.train)
    if not isinstance(model, nn.Sequential) or (kind.forward, kind.train) != plain:
        return model
    from ddp_lab.models.module_hooks import hook_of

    if hook_of(model):
        return model
    modules = model.named_modules(remove_duplicate=False)
    blocks = {name: child for name, child in modules if name and "." not in name}
    with suppress(ConfigError):
        return Chain(input_shape, **blocks)
    return model
