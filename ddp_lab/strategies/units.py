"""The units of a model under fsdp: modules whose parameters are gathered before their forward pass.

A parameter that is used outside the forward pass of a unit cannot be in it, because it is not
gathered then. It stays with the unit around it, in the end with the model itself, whose own
parameters are gathered during the complete step.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.usage import Usage


def find_units(
    model: nn.Module, usage: Usage | None = None, keep_whole: Sequence[str] = ()
) -> list[nn.Module]:
    """Return the units of a model, without itself, inner modules before those that contain them.

    They are the children of the model and of its containers that have parameters. If a child cannot
    be a unit, because its parameters are also used elsewhere, its own children are considered in
    its place.

    Args:
        usage: what a forward pass uses of the model; None: unknown, so every child is expected to
            be called.
        keep_whole: patterns of the names of modules that are no units and contain none.

    Raises:
        ConfigError: a pattern matches no module.
    """
    names = {module: name for name, module in model.named_modules()}
    kept_whole = {inner for module in matched(names, keep_whole) for inner in module.modules()}
    parents = [model, *filter(is_container, names)]
    units = list[nn.Module]()
    for parent in parents:
        for child in parent.children():
            has_parameters = any(True for _ in child.parameters())
            if not has_parameters or child in kept_whole or is_container(child):
                continue
            alone = is_self_contained(child, model) and is_gathered_in_time(child, names, usage)
            (units if alone else parents).append(child)
    places = {module: place for place, module in enumerate(names)}
    return sorted(dict.fromkeys(units), key=lambda unit: (-names[unit].count("."), places[unit]))


def matched(names: dict[nn.Module, str], patterns: Sequence[str]) -> Iterator[nn.Module]:
    """Yield the modules whose names match the patterns.

    Raises:
        ConfigError: a pattern matches none.
    """
    for pattern in patterns:
        modules = [module for module, name in names.items() if name and fnmatchcase(name, pattern)]
        if not modules:
            some = ", ".join(list(names.values())[1:7])
            raise ConfigError(
                f"strategy.keep_whole=[{pattern}]: matches no module of the model. Use a name or a "
                f"pattern of names, for example of {some}"
            )
        yield from modules


def is_container(module: nn.Module) -> bool:
    """Return whether a module has no forward pass, or is an nn.Sequential with blocks of one class.

    The former are torch's lists and dicts of modules or parameters, and such classes of the user's.
    A block has modules of its own and is no nn.Sequential. An nn.Sequential of such lists is a
    container, too.
    """
    if not isinstance(module, nn.Sequential):
        return type(module).forward is nn.Module.forward
    children = module.children()
    blocks = [
        child
        for child in children
        if not isinstance(child, nn.Sequential) and any(child.children())
    ]
    return len({type(block) for block in blocks}) < len(blocks) or any(
        map(is_container, module.children())
    )


def is_self_contained(unit: nn.Module, model: nn.Module) -> bool:
    """Return whether no parameter of a module is tied to one outside of it."""
    own_parameters = set(unit.parameters())
    every = model.named_modules(remove_duplicate=False)
    prefixes = tuple(f"{name}." for name, module in every if module is unit)
    named = model.named_parameters(remove_duplicate=False)
    return all(
        name.startswith(prefixes) for name, parameter in named if parameter in own_parameters
    )


def is_gathered_in_time(unit: nn.Module, names: dict[nn.Module, str], usage: Usage | None) -> bool:
    """Return whether a module is called, and its parameters are used only within this call."""
    if usage is None:
        return True
    name = names[unit]
    inside = (
        within for parameter, within in usage.within.items() if parameter.startswith(f"{name}.")
    )
    return name in usage.called and all(name in modules for modules in inside)


def require_one_dtype(units: Sequence[nn.Module], names: dict[nn.Module, str]) -> None:
    """Check that the trainable parameters of each unit have one type, as torch sums them together.

    Args:
        units: inner modules before those that contain them; the last one is the model.
        names: of the parameters' modules.

    Raises:
        ConfigError: those of a unit have several types.
    """
    seen = set[nn.Parameter]()
    for unit in units:
        own_parameters = {
            name: parameter
            for name, parameter in unit.named_parameters()
            if parameter not in seen and parameter.requires_grad
        }
        seen.update(own_parameters.values())
        by_dtype: dict[torch.dtype, str] = {}
        for name, parameter in own_parameters.items():
            by_dtype.setdefault(parameter.dtype, f"{names[unit]}.{name}".lstrip("."))

        if len(by_dtype) > 1:
            (first_dtype, first), (other, second), *_ = by_dtype.items()
            raise ConfigError(
                f"strategy=fsdp: gathers {first} ({first_dtype}) and {second} ({other}) together, "
                "which must have one type. Use one type, or another strategy, for example ddp"
            )
