"""The optimizer of a rank that updates only some of the parameters that one device would update.

A rank of a pipeline holds those of its stages, and data parallelism freezes those that the trial
has not used. A function of parameters that groups them by position, as params[:-2], or computes an
option from their number, would then make another optimizer than on one device. It is therefore
called with all of them, too. Where that makes a difference, the rank uses this optimizer, without
the parameters that it does not update.
"""

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.kept_state import state_kept
from ddp_lab.training.optimizer import MakeOptimizer, construct_optimizer, param_groups

Groups = list[dict[str, Any]]
# of every optimizer, beside those that its class adds
KNOWN = {"param_groups", "state", "defaults"}
HOOKS = "_optimizer_"  # how the names of the attributes begin that hold hooks


def construct_for_part(
    make: MakeOptimizer,
    decays_all: bool,
    trained: Sequence[nn.Parameter],
    model: nn.Module,
    idle: Collection[str],
) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that this rank updates.

    Args:
        make, decays_all, trained: as in `PartOptimizer`.
        model: the complete model. The parameters of other stages stay where they were before
            `Strategy.setup`, maybe on the meta device.
        idle: names of those that one device would update, and that are frozen here.

    Raises:
        ConfigError: it cannot be made, or its step needs a closure.
    """
    on_one_device = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or name in idle
    ]
    if {*map(id, trained)} < {*map(id, on_one_device)}:
        return PartOptimizer(make, decays_all, trained, on_one_device).construct()
    return construct_optimizer(make, param_groups(trained, decays_all))


class PartOptimizer(NamedTuple):
    """Constructs the optimizer of a part of the parameters.

    Attributes:
        make: the user's function of parameters.
        decays_all: as in `param_groups`.
        trained: the parameters that are updated.
        all: those that one device would update, in the order of the complete model. Those of other
            stages may be on other devices.
    """

    make: MakeOptimizer
    decays_all: bool
    trained: Sequence[nn.Parameter]
    all: Sequence[nn.Parameter]

    def construct(self) -> torch.optim.Optimizer:
        """Return the optimizer of the own parameters, whose options are those on one device.

        Raises:
            ConfigError: it cannot be made, or its step needs a closure.
        """
        return restrict(self._of_all(), self.trained) if self._needs_all() else self._of_trained()

    def _of_trained(self) -> torch.optim.Optimizer:
        return construct_optimizer(self.make, param_groups(self.trained, self.decays_all))

    def _of_all(self) -> torch.optim.Optimizer:
        with all_trained(self.all):
            groups = param_groups(self.all, self.decays_all, kept=self.trained)
            return construct_optimizer(self.make, groups)

    def _needs_all(self) -> bool:
        """Return whether the function makes another optimizer of the own parameters than of all.

        Raises:
            ConfigError: it does, and the optimizer of all cannot be restricted to the own ones.
        """
        with state_kept(self.make, weights=False):
            try:
                of_all = self._of_all()
            except Exception:  # it cannot be made of parameters on several devices
                return False
            try:
                of_trained = self._of_trained()
            except Exception:  # for example because none of them has two dimensions
                of_trained = None
        kind = type(of_all).__name__
        keeps_tensors = holds_tensors(of_all)
        expected = groups_of(of_all, self.trained)
        if of_trained is not None and type(of_trained) is type(of_all):
            groups = groups_of(of_trained, self.trained)
            if same_groups(groups, expected):
                return False
            if keeps_tensors and same_options(groups, expected):
                return False
        if keeps_tensors:
            raise ConfigError(
                f"optimizer: the function of parameters makes another {kind} of the parameters "
                "that this rank updates than of all parameters of the model, and that of all "
                "cannot be used, because it keeps tensors or an optimizer of its own. Choose the "
                "options of a parameter by its name in the model or by its shape and not by its "
                "position or the number of parameters, or use strategy=fsdp"
            )
        return True


@contextmanager
def all_trained(parameters: Iterable[nn.Parameter]) -> Generator[None]:
    """Let the parameters require a gradient in the body, as on one device."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_()
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def groups_of(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> Groups:
    """Return the groups of an optimizer, with those of their parameters that are given."""
    numbers = {id(parameter) for parameter in parameters}
    groups: Groups = []
    for group in optimizer.param_groups:
        of_group: Sequence[nn.Parameter] = group["params"]
        places = [place for place, each in enumerate(of_group) if id(each) in numbers]
        restricted = group | {"params": [of_group[place] for place in places]}
        if "param_names" in group:
            restricted["param_names"] = [group["param_names"][place] for place in places]
        groups.append(restricted)
    return groups


def restrict(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """Remove all parameters but the given ones from an optimizer, and return it.

    Every rank keeps all groups, which may be empty.
    """
    for group, restricted in zip(
        optimizer.param_groups, groups_of(optimizer, parameters), strict=True
    ):
        group.update(restricted)
    numbers = {id(parameter) for parameter in parameters}
    for parameter in [*optimizer.state]:
        if id(parameter) not in numbers:
            del optimizer.state[parameter]
    return optimizer


def same_groups(groups: Groups, others: Groups) -> bool:
    """Return whether groups have the same parameters in the same order, and the same options."""
    if len(groups) != len(others):
        return False
    return all(
        [*map(id, group["params"])] == [*map(id, other["params"])] and is_same(group, other)
        for group, other in zip(groups, others, strict=True)
    )


def same_options(groups: Groups, others: Groups) -> bool:
    """Return whether groups have the same parameters, and each of them the same options."""
    by_parameter, other_by_parameter = (
        {id(parameter): group for group in each for parameter in group["params"]}
        for each in (groups, others)
    )
    return by_parameter.keys() == other_by_parameter.keys() and all(
        is_same(group, other_by_parameter[number]) for number, group in by_parameter.items()
    )


def is_same(group: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two groups have the same options."""
    options, other_options = (
        {key: value for key, value in each.items() if key not in ("params", "param_names")}
        for each in (group, other)
    )
    return options.keys() == other_options.keys() and all(
        is_equal(value, other_options[key]) for key, value in options.items()
    )


def is_equal(value: Any, other: Any) -> bool:
    """Return whether two values of an option are equal; False if they cannot be compared."""
    if value is other:
        return True
    try:
        return bool(torch.equal(value, other) if torch.is_tensor(value) else value == other)
    except Exception:
        return False


def holds_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer refers to tensors, modules or optimizers beside its own groups.

    A scalar, such as a learning rate on the device, does not belong to a parameter.
    """
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in KNOWN and not name.startswith(HOOKS)
    }
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    left: list[Any] = [attributes, options]
    seen: dict[int, Any] = {}
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, torch.Tensor):
            if each.dim():
                return True
        elif isinstance(each, (nn.Module, torch.optim.Optimizer)):
            return True
        elif isinstance(each, dict):
            left += [*cast("dict[Any, Any]", each).values()]
        elif isinstance(each, (list, tuple, set)):
            left += [*cast("Iterable[Any]", each)]
    return False
