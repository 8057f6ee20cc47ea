"""Parameters that a forward pass begins to change later in training, which no trial has shown.

written_weights.py says which changes are as on one device. Its trial runs before the first step.
Code such as `if self.steps > 1000: self.weight.clamp_(...)` is seen here, around each forward pass
of a part of the model: in place or by another tensor, the pass has changed a parameter if torch
counts another version of it, or if it is elsewhere in memory. That is free for the device.

torch does not count a change through `weight.data`. So a few passes also compare sums of the
values: the passes 1, 2, 4, 8, ... and each 101st, of training and of evaluation separately. That
reads all parameters twice.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
from torch import nn

from ddp_lab.config.errors import TrainingError
from ddp_lab.models.usage import memory_of
from ddp_lab.strategies.dtensor import local

if TYPE_CHECKING:
    from ddp_lab.strategies.base import Strategy

# Passes between two comparisons of values. It is a prime, so that a write in every k-th pass, such
# as the first of each gradient accumulation or epoch, is met for every k that it does not divide.
EVERY = 101
REMEDY = (
    "Change it by operations of torch, not through NumPy, and from the first step on, so that the "
    "trial sees it (in a Lab, lab.trainer(..., example=dataset[0])); or after the step, under "
    "torch.no_grad(); or use strategy=single"
)


class Slot(NamedTuple):
    """The place of a parameter in a model.

    Attributes:
        name: of the parameter in the model.
        module: that has it.
        key: name of the parameter in `module`.
    """

    name: str
    module: nn.Module
    key: str

    def parameter(self) -> nn.Parameter | None:
        return self.module._parameters.get(self.key)  # pyright: ignore[reportPrivateUsage]


class State(NamedTuple):
    """What shows that a parameter has been changed.

    Attributes:
        parameter: None: the module has none of this name.
        version: how often torch has changed it in place.
        memory: identifier of its memory.
        total: sum that depends on all values, []; None: not compared.
    """

    parameter: nn.Parameter | None
    version: int
    memory: tuple[int, int]
    total: torch.Tensor | None


class PartWatch:
    """Compares the parameters of a part of a model before and after each forward pass of it.

    Args:
        slots: of the parameters.
        strategy: its name, for the message.
        rank: of this process.
        reads_values: whether some passes compare the values. The tensors of a plan have none.
    """

    def __init__(
        self, slots: Collection[Slot], strategy: str, rank: int, reads_values: bool = True
    ):
        self.slots = slots
        self.strategy = strategy
        self.rank = rank
        self.reads_values = reads_values
        self.passes = {True: 0, False: 0}  # in training mode, and in evaluation mode
        self._before: list[Mapping[Slot, State]] = []  # of passes that have begun
        self._shards: dict[Slot, nn.Parameter] = {}

    def gather(self, part: nn.Module, inputs: Any) -> None:
        """Check that the shards are those of the pass before, as a hook before fully_shard's.

        Raises:
            TrainingError: a module around the part has put another parameter in the place of one.
        """
        for slot in self.slots:
            parameter = slot.parameter()
            if hasattr(parameter, "placements"):
                assert parameter is not None
                if self._shards.setdefault(slot, parameter) is not parameter:
                    self._refuse(slot)

    def begin(self, part: nn.Module, inputs: Any) -> None:
        """Note the parameters, as a hook before the forward pass."""
        if is_computed_again():
            return
        self.passes[part.training] += 1
        number = self.passes[part.training]
        is_power_of_two = number & (number - 1) == 0
        with_values = self.reads_values and (is_power_of_two or number % EVERY == 0)
        self._before.append(self._states(with_values))

    def end(self, part: nn.Module, inputs: Any, outputs: Any) -> None:
        """Compare them, as a hook after it.

        Raises:
            TrainingError: a parameter has been changed.
        """
        if is_computed_again():
            return
        before = self._before.pop()
        with_values = any(state.total is not None for state in before.values())
        after = self._states(with_values)
        for slot, state in before.items():
            if differ(state, after[slot]):
                self._refuse(slot)

    def _refuse(self, slot: Slot) -> NoReturn:
        raise TrainingError(
            f"strategy={self.strategy}: a forward pass has changed the parameter {slot.name}, "
            "which no trial before the first step has shown. Whether the result is that of one "
            f"device is not known then. {REMEDY}",
            rank=self.rank,
        )

    def _states(self, with_values: bool) -> dict[Slot, State]:
        states: dict[Slot, State] = {}
        for slot in self.slots:
            parameter = slot.parameter()
            if parameter is None:
                states[slot] = State(None, 0, (0, 0), None)
            else:
                states[slot] = state_of(parameter, with_values)
        return states


def is_computed_again() -> bool:
    """Return whether a backward pass is running, which computes a block again to its last need."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def state_of(parameter: nn.Parameter, with_values: bool) -> State:
    """Return the state of a parameter.

    Args:
        with_values: whether to read the values, too, if that is possible now.
    """
    tensor = local(parameter.detach())
    total = None
    capturing = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    if with_values and tensor.numel() and not tensor.is_meta and not capturing:
        total = checksum(tensor)
    # of a shard, and of the DTensor around it
    memory = (memory_of(tensor), memory_of(parameter))
    return State(parameter, parameter._version, memory, total)


def differ(before: State, after: State) -> bool:
    """Return whether a parameter has been changed between two states.

    A part of fully_shard may be gathered in one of them and not in the other.
    """
    if hasattr(before.parameter, "placements") != hasattr(after.parameter, "placements"):
        return False
    if before.parameter is not after.parameter:
        return True
    if (before.version, before.memory) != (after.version, after.memory):
        return True
    if before.total is None or after.total is None:
        return False
    return not torch.equal(before.total, after.total)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return an integer, [], that depends on all bits of a tensor and on the order of its rows."""
    bits = tensor.flatten().contiguous().view(torch.uint8)
    width = max(1, bits.numel() // max(1, tensor.size(0) if tensor.dim() else 1))
    rows = bits.view(-1, width).sum(1, dtype=torch.int64)
    weights = torch.arange(1, len(rows) + 1, device=rows.device)
    return (rows * weights).sum()


def watch_parts(
    parts: Iterable[nn.Module], model: nn.Module, strategy: "Strategy"
) -> list[tuple[nn.Module, PartWatch]]:
    """Watch the parameters of parts of a model around each forward pass of them.

    Args:
        parts: of which the strategy calls each one. Hooks of the user are called within them.
        model: that contains them, for the names.
        strategy: in `setup`, with `written`: what the trial has found is not watched.

    Returns:
        The parts with parameters, and their watches.
    """
    slots: dict[nn.Module, list[Slot]] = {}
    for path, module in model.named_modules():
        for key, _ in module.named_parameters(recurse=False):
            name = f"{path}.{key}" if path else key
            if name not in (strategy.written or {}):
                slots.setdefault(module, []).append(Slot(name, module, key))
    watches: list[tuple[nn.Module, PartWatch]] = []
    for part in parts:
        of_part = [slot for module in part.modules() for slot in slots.get(module, ())]
        if of_part:
            runtime = strategy.runtime
            has_values = not runtime.is_planned
            watch = PartWatch(of_part, strategy.name, runtime.rank, has_values)
            part.register_forward_pre_hook(untraced(watch.begin), prepend=True)
            part.register_forward_hook(untraced(watch.end))
            watches.append((part, watch))
    return watches


def watch_gathering(watches: Iterable[tuple[nn.Module, PartWatch]]) -> None:
    """Watch parts that fully_shard gathers, too, after it has sharded them."""
    for part, watch in watches:
        part.register_forward_pre_hook(untraced(watch.gather), prepend=True)


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that torch.compile does not trace. It loads torch.compile in 1 s."""
    return cast("Callable[..., Any]", torch.compiler.disable(hook))
