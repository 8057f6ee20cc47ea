"""A trial of a tensor-parallel plan: the divided model must compute what the undivided one did.

Both get the same samples before anything is written, and outputs and gradients are compared:

    undivided   forward, backward -> fingerprints of outputs, activations and gradients
    divided     forward, backward -> the same; the first one that differs is reported

A fingerprint is two numbers of a tensor, so no activation is kept. Activations whose size differs
are those that the plan divides. They are not compared: what is wrong with them is found where the
ranks' parts come together.

The passes are those of the evaluation mode, in which a model draws nothing. A model that draws
random numbers in training, as dropout does, is compared in training mode, too, from the same state
of the generator: where it draws numbers for a part that is divided, other numbers follow.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError, describe_error, raise_first
from ddp_lab.data.trees import Tree, to
from ddp_lab.models.calls import call
from ddp_lab.models.kept_state import random_state_kept, state_kept
from ddp_lab.models.outputs import tensors_of
from ddp_lab.models.random_draws import Draws
from ddp_lab.models.real_view import real_view
from ddp_lab.models.trial import random_like
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.batch_norm import is_batch_norm
from ddp_lab.world.device import float32_matmul
from ddp_lab.world.runtime import Runtime

CHUNK = 2**22  # elements whose fingerprint is computed at once
SEED = 0
SHAPES = "torch._subclasses.fake_tensor"  # torch's logger, which writes each error with a traceback
BLOCK_REMEDY = "Correct the plan, or remove it"
# Of the norm of all gradients or activations: what is smaller may be rounding errors alone, as the
# gradient of a key's bias, which is mathematically zero.
SMALL = 1e-2


class Mark(NamedTuple):
    """The fingerprint of a tensor.

    Attributes:
        size: number of its elements.
        norm: its L2 norm, [].
        mixed: the sum of its elements, each times another number from -1 to 1, [].
    """

    size: int
    norm: torch.Tensor
    mixed: torch.Tensor


def mark_of(tensor: torch.Tensor) -> Mark:
    """Return the fingerprint of a tensor."""
    flat = real_view(tensor.detach()).reshape(-1)
    square = torch.zeros((), dtype=torch.float64, device=tensor.device)
    mixed = torch.zeros_like(square)
    start = 0
    for chunk in flat.split(CHUNK):
        places = torch.arange(start, start + len(chunk), dtype=torch.float64, device=flat.device)
        values = chunk.double()
        square += values.square().sum()
        mixed += (values * places.cos()).sum()
        start += len(chunk)
    return Mark(len(flat), square.sqrt(), mixed)


class Marks(NamedTuple):
    """What a pass computed.

    Attributes:
        activations: fingerprints of what modules have returned, by the module's name, the number of
            its call and the number of the tensor, in the order of the calls' ends; the model's own
            outputs have the name "".
        gradients: of the parameters that have got one, by name.
    """

    activations: dict[tuple[str, int, int], Mark]
    gradients: dict[str, Mark]


class PlanTrial:
    """The trial of a plan.

    Args:
        model: on its device; complete now, and divided in place before `compare`.
        inputs: some samples.
        runtime: of this rank.
        key: what messages call the plan.
        remedy: what can be done, for messages.
        layers: what the plan says of each layer, by name, for messages.

    Raises:
        ConfigError: the model itself cannot run with these inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Tree,
        runtime: Runtime,
        key: str,
        remedy: str,
        layers: Mapping[str, str],
    ):
        self.model = model
        self.inputs = to(inputs, runtime.device)
        self.runtime = runtime
        self.key = key
        self.remedy = remedy
        self.layers = layers
        self.running: list[str] = []
        try:
            self.expected = self._run(training=False)
            draws = Draws()
            with draws:
                drawn = self._run(training=True)
        except Exception as error:
            raise ConfigError(
                f"{key}: the model cannot be tried in evaluation mode before it is divided: "
                f"{describe_error(error)}"
            ) from None
        self.drawn = drawn if draws.has_drawn else None

    def compare(self, complete_gradients: Callable[[], object]) -> None:
        """Check that the model computes what it did. Collective.

        Args:
            complete_gradients: called after the backward pass, before gradients are compared.

        Raises:
            ConfigError: it computes something else, or fails.
        """
        problem = self._find_problem(complete_gradients)
        self.runtime.gather_and_decide("plan trial", problem, raise_first)

    def _find_problem(self, complete_gradients: Callable[[], object]) -> str:
        try:
            with silent(SHAPES):
                divided = self._run(training=False, complete_gradients=complete_gradients)
        except Exception as error:
            where = self.running[-1] if self.running else ""
            return self._message(f"{named(where)} fails: {describe_error(error)}", where)
        if difference := self._difference(self.expected, divided):
            return self._message(*difference)
        if self.drawn is None:
            return ""
        try:
            difference = self._difference(self.drawn, self._run(training=True))
        except Exception as error:
            return self._message(f"in training mode {describe_error(error)}", "")
        if difference:
            return (
                f"{self.key}: the model draws random numbers, as dropout does, for a part that is "
                f"divided: in training {difference[0]}. Set the probability of this dropout to 0, "
                "or leave the layers around it out of the plan"
            )
        return ""

    def _message(self, difference: str, where: str) -> str:
        """Return the message about a difference.

        Args:
            difference: what differs.
            where: name of a module; the plan's words near it are listed.
        """
        around = where
        near: list[str] = []
        while not near:
            prefix = f"{around}." if around else ""
            near = [
                f"{name} ({said})"
                for name, said in self.layers.items()
                if name == around or name.startswith(prefix)
            ]
            if not around:
                break
            around = around.rpartition(".")[0]
        listed = ", ".join(near[:8]) + (f" and {len(near) - 8} more" if len(near) > 8 else "")
        return (
            f"{self.key}: the divided model does not compute what the model does: {difference}. "
            f"The plan says there: {listed}. A column layer returns some units on each rank, so "
            "that all layers that get these units must be row layers, and q, k and v of an "
            f"attention are divided together. {self.remedy}"
        )

    def _difference(self, expected: Marks, divided: Marks) -> tuple[str, str] | None:
        """Return what differs, and the module of it; None if nothing does."""
        eps = torch.finfo(torch.get_default_dtype()).eps
        floats = [each.dtype for each in self.model.parameters() if each.is_floating_point()]
        if floats:
            eps = max(torch.finfo(dtype).eps for dtype in floats)
        allowed = eps**0.5
        for name, mark in expected.activations.items():
            other = divided.activations.get(name)
            if other is None or (other.size != mark.size and name[0]):
                continue
            if other.size != mark.size:
                return "the outputs have another shape", ""
            if (error := relative_error(mark, other, 0.0)) > allowed:
                return (
                    f"the output of {named(name[0])} differs by {error:.1e} (rounding: up to "
                    f"{allowed:.1e})"
                ), name[0]

        total = sum(float(mark.norm) ** 2 for mark in expected.gradients.values()) ** 0.5
        for name, mark in expected.gradients.items():
            other = divided.gradients.get(name)
            error = 1.0 if other is None else relative_error(mark, other, SMALL * total)
            if not error <= allowed:
                return (
                    f"the gradient of {name} differs by {error:.1e} (rounding: up to {allowed:.1e})"
                ), name.rpartition(".")[0]
        return None

    def _run(
        self, training: bool, complete_gradients: Callable[[], object] = lambda: None
    ) -> Marks:
        """Return what a forward pass and, in evaluation mode, a backward pass compute.

        The model's state and the random generators are restored.
        """
        model = self.model
        was_training = model.training
        highest = float32_matmul("highest")
        with highest, random_state_kept(), state_kept(model, weights=False):
            torch.manual_seed(SEED)
            model.train(training)
            for layer in filter(is_batch_norm, model.modules()):
                layer.eval()  # two equal samples have no variance
            try:
                with recorded(model, self.running) as activations:
                    with torch.set_grad_enabled(not training):
                        outputs = tensors_of(call(model, self.inputs))
                    for number, tensor in enumerate(outputs):
                        activations["", 0, number] = mark_of(tensor)
                    if training:
                        return Marks(activations, {})
                    backward(outputs)
                complete_gradients()
                return Marks(activations, dict(gradients_in(model)))
            finally:
                model.train(was_training)
                for parameter in model.parameters():
                    parameter.grad = None


def begin_trial(
    strategy: Strategy, model: nn.Module, key: str, remedy: str, layers: Mapping[str, str]
) -> PlanTrial | None:
    """Return the trial of a strategy's plan; None if there is no sample.

    Args:
        strategy: after `partition`.
        model, key, remedy, layers: as in `PlanTrial`.
    """
    if strategy.sample is None or strategy.runtime.is_planned:
        return None
    inputs = random_like(strategy.sample())
    return PlanTrial(
        model=model, inputs=inputs, runtime=strategy.runtime, key=key, remedy=remedy, layers=layers
    )


def key_of_blocks(blocks: Iterable[nn.Module]) -> str:
    """Return what messages call the plans of blocks."""
    kinds = dict.fromkeys(type(block).__name__ for block in blocks)
    return f"the attribute tensor_parallel of {', '.join(kinds)}"


@contextmanager
def silent(name: str) -> Generator[None]:
    """Let a logger write nothing in the body."""
    log = logging.getLogger(name)
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def named(name: str) -> str:
    """Return how a message calls a module."""
    return name or "the model"


def relative_error(expected: Mark, divided: Mark, least: float) -> float:
    """Return by how much two tensors differ, relative to the norm of the first one.

    Args:
        expected, divided: of tensors of one size.
        least: by what is divided at least.
    """
    scale = max(float(expected.norm), least)
    error = max(
        abs(float(divided.norm) - float(expected.norm)), abs(float(divided.mixed - expected.mixed))
    )
    return error / scale if scale else error


@contextmanager
def recorded(model: nn.Module, running: list[str]) -> Generator[dict[tuple[str, int, int], Mark]]:
    """Yield a dict that gets the fingerprints of what modules return in the body.

    Args:
        running: gets the names of the modules whose `forward` is running, the innermost one last.
    """
    marks: dict[tuple[str, int, int], Mark] = {}
    calls: dict[str, int] = {}
    running.clear()

    def leave(name: str, outputs: Any) -> None:
        running.pop()
        number = calls.get(name, -1) + 1
        calls[name] = number
        for place, tensor in enumerate(tensors_of(outputs)):
            if tensor.is_floating_point() or tensor.is_complex():
                marks[name, number, place] = mark_of(tensor)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if not name:
                continue
            enter = module.register_forward_pre_hook(
                lambda *_, name=name: running.append(name), prepend=True
            )
            after = module.register_forward_hook(
                lambda _module, _inputs, outputs, name=name: leave(name, outputs)
            )
            hooks.callback(enter.remove)
            hooks.callback(after.remove)
        yield marks


def backward(outputs: list[torch.Tensor]) -> None:
    """Compute gradients of a sum of all outputs, in which each element has another factor."""
    generator = torch.Generator().manual_seed(SEED)
    terms: list[torch.Tensor] = []
    for tensor in outputs:
        if tensor.requires_grad:
            values = real_view(tensor)
            factors = torch.randn(values.shape, generator=generator, dtype=values.dtype)
            terms.append((values * factors.to(values.device)).sum().float())
    if terms:
        torch.stack([term.to(terms[0].device) for term in terms]).sum().backward()


def gradients_in(model: nn.Module) -> Iterator[tuple[str, Mark]]:
    """Yield the fingerprints of the complete gradients, by the parameter's name. Collective."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            complete = getattr(gradient, "full_tensor", None)
            yield name, mark_of(gradient if complete is None else complete())
