"""A trial of the model before the run: a forward and a backward pass.

Its two samples show which parameters are not used.
"""

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ddp_lab.config.errors import ConfigError, SampleError, count, count_with_verb, describe_error
from ddp_lab.data.trees import Tree, apply, leaves, size, to
from ddp_lab.models.calls import call, describe_arguments, describe_shapes
from ddp_lab.models.chain import Chain
from ddp_lab.models.kept_state import state_kept
from ddp_lab.models.outputs import map_outputs, require_tensor, sum_of
from ddp_lab.models.real_view import real_view
from ddp_lab.world.runtime import Runtime

T = TypeVar("T", bound=Tree)
# of random inputs, before a parameter counts as unused: a branch may depend on the numbers
DRAWS = 8
# Parameters from which a model is tried without data, whose imports take 1.2 s: on the meta device,
# or on fake tensors. With data a Llama of a billion took a minute on a processor.
LARGE = 10_000_000


class LossError(ConfigError):
    """The loss has failed, and not the model; the message says so."""


class Tried(NamedTuple):
    """What a trial has found.

    Attributes:
        unused: names of the trainable parameters that get no gradient.
        notes: about frozen and unused parameters, for the log.
    """

    unused: frozenset[str]
    notes: list[str]


@dataclass(frozen=True)
class Trial:
    """What a model is tried with.

    Attributes:
        inputs: two samples, on the CPU; those of numbers with a fraction are random.
        check: raises an exception if the outputs, on any device, are not those that the task needs.
            Of outputs that are no tensor it returns the number to backpropagate, [].
        of_all: whether ddp_lab's own models are tried, too, which may be made for another task.
        freezes: whether parameters without a gradient are frozen; False if other steps may use
            them.
    """

    inputs: Tree
    check: Callable[[Any], torch.Tensor | None]
    of_all: bool = False
    freezes: bool = True


def random_like(inputs: T, draw: int = 0) -> T:
    """Return random numbers in place of inputs that have a fraction, else the inputs.

    Args:
        inputs: of any shape.
        draw: number of the draw: 0 has numbers from 0 to 1, others are normally distributed.
    """
    generator = torch.Generator().manual_seed(draw)
    make = torch.randn if draw else torch.rand

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        has_fraction = tensor.is_floating_point()
        if has_fraction:
            return make(tensor.shape, generator=generator, dtype=tensor.dtype)
        return tensor

    return apply(drawn, inputs)


def freeze_unused(model: nn.Module, trial: Trial, runtime: Runtime, key: str) -> Tried:
    """Find the parameters that a step does not use, and freeze them if the trial says so.

    No gradient reaches an unused parameter, so one device leaves it as it is. Some strategies would
    wait for its gradient.
    A frozen parameter (requires_grad=False) has no gradient under any strategy.

    Args:
        model: the complete model. Its state, that of the loss in the trial and random states are
            restored.
        trial: what it is tried with.
        key: key and value of the config that the messages are about.

    Raises:
        ConfigError: the model cannot process these inputs, its outputs are not those of the task,
            or it has nothing to train.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = [name for name, _ in model.named_parameters() if name not in trained]
    unused = find_unused(model, trial, runtime, key) if trained else []
    is_random = any(tensor.is_floating_point() for _, tensor in leaves(trial.inputs))
    for draw in range(1, DRAWS):
        if not 0 < len(unused) < len(trained) or not is_random:
            break
        other = replace(trial, inputs=random_like(trial.inputs, draw))
        with suppress(ConfigError):  # a model may refuse numbers below 0
            also_unused = find_unused(model, other, runtime, key)
            unused = [name for name in unused if name in also_unused]

    if len(unused) == len(trained):
        raise ConfigError(
            f"{key}: has nothing to train: "
            f"{'its logits depend on no parameter' if trained else 'all parameters are frozen'}. "
            "Leave requires_grad=True for some of the parameters that `forward` uses, for example "
            "for the head"
        )

    for name in unused if trial.freezes else ():
        model.get_parameter(name).requires_grad = False
    if trial.freezes:
        stay = "it stays as it is" if len(unused) == 1 else "they stay as they are"
        how_unused = f"not used in training, so {stay}"
    else:
        how_unused = "not used by two samples"

    notes = {"frozen": frozen, how_unused: unused}
    names_by_note = {note: names for note, names in notes.items() if names}
    lines = [
        f"{count_with_verb(len(names), 'parameter')} {note}: {some(names)}"
        for note, names in names_by_note.items()
    ]
    return Tried(frozenset(unused), lines)


def find_unused(model: nn.Module, trial: Trial, runtime: Runtime, key: str) -> list[str]:
    """Return the names of the trainable parameters that get no gradient in a training step.

    The arguments are as above.
    """
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if not on_meta and is_large(model):
        # A model that reads values cannot run on the meta device, which computes shapes only.
        with suppress(Exception), state_kept(model, trial.check, weights=False):
            return without_gradient(meta_copy(model), trial, "meta")
        # One that asks first whether there are values, as those of transformers, runs here.
        kept = state_kept(model, trial.check, weights=False)
        with suppress(Exception), kept, fake_copy(model) as copied:
            return without_gradient(copied, on_meta_device(trial), "cpu")
    device = runtime.device
    try:
        if on_meta and isinstance(model, Chain):
            with state_kept(model, trial.check):
                return without_gradient(meta_copy(model), trial, "meta")
        if on_meta:
            with state_kept(model, trial.check), fake_copy(model) as copied:
                return without_gradient(copied, on_meta_device(trial), "cpu")
        cuda = [device] if device.type == "cuda" else []
        with state_kept(model, trial.check), torch.random.fork_rng(cuda), runtime.autocast():
            return without_gradient(model.to(device), trial, device)
    except LossError:
        raise
    except (ConfigError, SampleError) as error:
        raise ConfigError(f"{key}: {error}") from None
    except Exception as error:
        if problem := describe_arguments(error, model):
            raise ConfigError(f"{key}: {problem}") from None
        other = ""
        if runtime.precision != "float32":
            name = runtime.precision
            other = f"precision=float32, if a layer does not support {name} on this device, or "
        small = " (a common cause is that they are too small)" if is_images(trial.inputs) else ""
        raise ConfigError(
            f"{key}: failed for {describe(trial.inputs)}: {describe_error(error)}. Use "
            f"{other}inputs that the model supports{small}, or correct the model"
        ) from None


def is_large(model: nn.Module) -> bool:
    """Return whether a model has so many parameters that it is tried without data first."""
    return sum(parameter.numel() for parameter in model.parameters()) > LARGE


def on_meta_device(trial: Trial) -> Trial:
    """Return a trial that checks outputs on the meta device, where losses read no values."""

    def check(outputs: Any) -> torch.Tensor | None:
        return trial.check(map_outputs(lambda tensor: tensor.to("meta"), outputs))

    return replace(trial, check=check)


def is_images(inputs: Tree) -> bool:
    """Return whether inputs are a batch of images, by their dimensions."""
    return isinstance(inputs, torch.Tensor) and inputs.dim() == 4


def describe(inputs: Tree) -> str:
    """Return the shape of a sample, for a message."""
    if not isinstance(inputs, torch.Tensor) or not is_images(inputs):
        return describe_shapes(inputs)
    return f"images of {'x'.join(map(str, inputs.shape[1:]))} (channels, height, width)"


def without_gradient(model: nn.Module, trial: Trial, device: torch.device | str) -> list[str]:
    """Run a forward and backward pass; return the trainable parameters without a gradient.

    A forward pass in evaluation mode follows, because a mistake there would otherwise be found
    after the first epoch.
    """
    inputs = to(trial.inputs, device)
    outputs = call(model.train(), inputs)
    require_batch(outputs, size(inputs), "")
    checked = trial.check(outputs)
    total = real_view(outputs).float().sum() if isinstance(outputs, torch.Tensor) else checked
    if total is not None and total.requires_grad:
        total.backward()

    with torch.no_grad():
        outputs = call(model.eval(), inputs)
        require_batch(outputs, size(inputs), "in evaluation mode ")
        try:
            trial.check(outputs)
        except LossError:
            raise
        except ConfigError as error:
            raise ConfigError(f"in evaluation mode {error}") from None

    model.train()
    return [
        name
        for name, tensor in model.named_parameters()
        if tensor.requires_grad and tensor.grad is None
    ]


def count_flops(model: nn.Module, inputs: Tree) -> float | None:
    """Return the FLOPs of forward and backward pass for a sample, by torch's formulas.

    Return None if the meta device cannot run it.

    Args:
        model: the complete model, which stays as it is.
        inputs: some samples.
    """
    with suppress(Exception), FlopCounterMode(display=False) as counter:
        sum_of(call(meta_copy(model).train(), to(inputs, "meta"))).backward()
        return counter.get_total_flops() / size(inputs)
    return None


def require_batch(outputs: Any, size: int, when: str) -> None:
    """Raise a TypeError if a model has returned one tensor that is not [size, ...]."""
    if isinstance(outputs, torch.Tensor) and outputs.shape[:1] != (size,):
        shape = list(outputs.shape)
        raise TypeError(
            f"{when}it must return a tensor [{size}, ...] for {count(size, 'sample')}, got {shape}"
        )


def check_logits(outputs: Any, classes: int) -> None:
    """Raise a ConfigError or a TypeError unless a model returned logits of shape [b, classes]."""
    logits = require_tensor(outputs, "it")
    if logits.dim() != 2 or logits.size(1) != classes:
        expected = [len(logits), classes]
        raise TypeError(
            f"it must return logits of shape {expected} (batch, classes), got {list(logits.shape)}"
        )


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device.

    No memory is allocated for its parameters and buffers.
    """
    memo: dict[int, torch.Tensor] = {
        id(tensor): torch.empty_like(tensor, device="meta") for tensor in model.buffers()
    }
    for tensor in model.parameters():
        memo[id(tensor)] = nn.Parameter(
            torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad
        )
    return copy.deepcopy(model, memo)


@contextmanager
def fake_copy(model: nn.Module, device: torch.device | str = "cpu") -> Generator[nn.Module]:
    """Let the body compute with a copy of the model that has no data, on fake tensors.

    Unlike on the meta device, a model can ask whether its tensors have values, as those of
    transformers do before they read a mask.

    Args:
        model: on any device, also on the meta device.
        device: that the copy pretends to be on.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield copy_in(mode, model, device)


def copy_in(
    mode: AbstractContextManager[object], model: nn.Module, device: torch.device | str
) -> nn.Module:
    """Return a copy of a model with fake tensors of a mode, on a device."""
    memo: dict[int, torch.Tensor] = {}
    with mode:
        for tensor in model.buffers():
            memo[id(tensor)] = torch.empty_like(tensor, device=device)
        for tensor in model.parameters():
            data = torch.empty_like(tensor, device=device)
            memo[id(tensor)] = nn.Parameter(data, requires_grad=tensor.requires_grad)
    return copy.deepcopy(model, memo)


def some(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
