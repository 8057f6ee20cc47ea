"""Whether an optimizer updates shards, or the parameters of a stage, as it does all of one device.

SGD, Adam and AdamW update each element by itself. Others, such as LARS and LAMB, compute norms of
complete parameters, and some compute one number from all of them. A few steps with made-up
parameters show whether the division changes what they compute.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_lab.config.build import for_cpu
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.models.kept_state import state_kept
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.dtensor import full_tensor, local, shard_of
from ddp_lab.training.optimizer import MakeOptimizer, construct_optimizer, param_groups, step_of
from ddp_lab.training.part_optimizer import PartOptimizer

Tensors = Sequence[torch.Tensor]
STEPS = 3
EXACT = 1e-6  # of the largest change of an element, in float64
LARGEST = 10.0  # ratio of the sizes of the last and the first row of a made-up tensor
ROWS = 2  # of each shard


class WholeScalars(TorchDispatchMode):
    """Let `.item()`, `float()` and `bool()` of a DTensor return the value over all shards."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and hasattr(args[0], "full_tensor"):
            return func(args[0].full_tensor())
        return func(*args, **kwargs or {})


class Layout(NamedTuple):
    """The layout of some parameters of a strategy.

    Attributes:
        dims: number of dimensions, but 2 at most.
        mesh, placements: as of a DTensor; None: the parameters are complete on each rank.
        device: of the parameters.
    """

    dims: int
    mesh: Any
    placements: Any
    device: torch.device

    def make(self, seed: int) -> torch.Tensor:
        """Return a complete tensor of random numbers in float64, whose rows differ in size."""
        size = ROWS * (2 if self.mesh is None else self.mesh.size())
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn([size] * self.dims, generator=generator, dtype=torch.float64)
        sizes = torch.linspace(1, LARGEST, size, dtype=torch.float64)
        rows = sizes.view(size, *[1] * (self.dims - 1))
        return (numbers * rows).to(self.device)

    def divide(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a complete tensor, as a DTensor; without shards a copy."""
        if self.mesh is None:
            return tensor.clone()
        return shard_of(tensor.clone(), self.mesh, self.placements)


def check_divided(
    make: MakeOptimizer, optimizer: torch.optim.Optimizer, strategy: Strategy, decays_all: bool
) -> None:
    """Check that an optimizer computes the same from shards, and from the parameters of a stage.

    Collective.

    Args:
        make: constructs the optimizer of groups of parameters.
        optimizer: of the strategy's parameters.
        strategy: after `setup`.
        decays_all: as in `param_groups`.

    Raises:
        ConfigError: it does not.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if strategy.runtime.is_planned:
        return  # the parameters have no values
    kind = type(optimizer).__name__
    with state_kept(make, weights=False), torch.enable_grad():
        layouts = layouts_of(parameters)
        if any(layout.mesh is not None for layout in layouts):
            check_shards(Steps(make, decays_all), layouts, strategy, kind)
        if strategy.axes.get("pp", 1) > 1:
            check_stages(Steps(make, decays_all), strategy, kind)


class Steps(NamedTuple):
    """Steps of an optimizer.

    Attributes:
        make: constructs it.
        decays_all: as in `param_groups`.
    """

    make: MakeOptimizer
    decays_all: bool

    def take(
        self, parameters: Tensors, gradients: Sequence[Tensors], only: int | None = None
    ) -> list[torch.Tensor]:
        """Return copies of the complete parameters after a step with each of the gradients.

        Collective if they have shards.

        Args:
            parameters: all of the model.
            gradients: of each step.
            only: the place of the only parameter of a stage, which is updated; None: all are.
        """
        trained = [nn.Parameter(parameter) for parameter in parameters]
        if only is None:
            optimizer = construct_optimizer(self.make, param_groups(trained, self.decays_all))
        else:
            part = [trained[only]]
            optimizer = PartOptimizer(self.make, self.decays_all, part, trained).construct()
        if trained[0].device.type == "cpu":
            optimizer = for_cpu(optimizer)
        step = step_of(optimizer)
        for of_step in gradients:
            for parameter, gradient in zip(trained, of_step, strict=True):
                parameter.grad = gradient.clone()  # the step may change it
            step()
        return [full_tensor(parameter, keep=True) for parameter in trained]


def layouts_of(parameters: Sequence[nn.Parameter]) -> list[Layout]:
    """Return the layouts of parameters, in the order in which they have them."""
    layouts: dict[Layout, None] = {}
    for parameter in parameters:
        dims = max(1, min(parameter.dim(), 2))
        mesh = getattr(parameter, "device_mesh", None)
        placements = getattr(parameter, "placements", None)
        layouts[Layout(dims, mesh, placements, local(parameter.data).device)] = None
    return [*layouts]


def check_shards(steps: Steps, layouts: Sequence[Layout], strategy: Strategy, kind: str) -> None:
    """Raise a ConfigError if steps on shards have another result than those on complete parameters.

    Collective.

    Args:
        steps: of the optimizer.
        layouts: of the strategy's parameters.
        strategy: after `setup`.
        kind: name of the optimizer's class.
    """
    wholes = [layout.make(place) for place, layout in enumerate(layouts)]
    gradients = made_up_gradients(layouts)

    def divide(tensors: Tensors) -> list[torch.Tensor]:
        return [layout.divide(tensor) for layout, tensor in zip(layouts, tensors, strict=True)]

    try:
        expected = steps.take([whole.clone() for whole in wholes], gradients)
    except Exception:  # it cannot update such parameters on one device, either
        return
    try:
        updated = steps.take(divide(wholes), [divide(each) for each in gradients])
    except Exception as error:
        why = describe_error(error)
        refuse(strategy, f"shards the parameters as DTensors, which {kind} does not support: {why}")

    difference = largest_difference(updated, expected, wholes)
    if difference > EXACT:
        refuse(
            strategy,
            f"shards the parameters, and {kind} computes something else from the shards of a "
            "made-up parameter than from the complete one, as norms of local tensors would be: a "
            f"change by its steps differs by {difference:.0%}. Compute them from the DTensors, as "
            "by parameter.norm()",
        )


def check_stages(steps: Steps, strategy: Strategy, kind: str) -> None:
    """Raise a ConfigError if steps on two parameters have another result than those on each alone.

    The arguments are as above.
    """
    layouts = [Layout(2, None, None, strategy.device)] * 2
    wholes = [layout.make(place) * LARGEST**place for place, layout in enumerate(layouts)]
    gradients = made_up_gradients(layouts)
    alone: list[torch.Tensor] = []
    try:
        together = steps.take([whole.clone() for whole in wholes], gradients)
        for place in range(len(wholes)):
            updated = steps.take([whole.clone() for whole in wholes], gradients, only=place)
            alone.append(updated[place])
    except Exception:  # as above
        return

    difference = largest_difference(alone, together, wholes)
    if difference > EXACT:
        refuse(
            strategy,
            f"divides the parameters between ranks, and {kind} computes the step of a parameter "
            "from others, too: for two made-up parameters a change by its steps differs by "
            f"{difference:.0%} from that for each alone",
        )


def made_up_gradients(layouts: Sequence[Layout]) -> list[list[torch.Tensor]]:
    """Return complete gradients for each step."""
    gradients: list[list[torch.Tensor]] = []
    for step in range(1, STEPS + 1):
        first = step * len(layouts)
        gradients.append([layout.make(first + place) for place, layout in enumerate(layouts)])
    return gradients


def largest_difference(updated: Tensors, expected: Tensors, before: Tensors) -> float:
    """Return the largest difference of an element, relative to the change of its parameter."""
    differences = [0.0]
    for result, other, start in zip(updated, expected, before, strict=True):
        change = (other - start.cpu()).abs().max().item()
        differences.append((result - other).abs().max().item() / max(change, 1e-30))
    return max(differences)


def refuse(strategy: Strategy, why: str) -> NoReturn:
    """Raise a ConfigError about the optimizer."""
    remedy = "Use another optimizer, such as torch.optim.AdamW, or strategy=ddp"
    raise ConfigError(f"optimizer: strategy={strategy.name} {why}. {remedy}")
