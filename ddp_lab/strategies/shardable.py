"""Models whose parameters cannot be sharded or divided: parameters without dimensions, and shared ones."""

from collections.abc import Hashable, Mapping

from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain


def require_dimensions(model: nn.Module, strategy: str) -> None:
    """Check that every parameter of the model can be sharded.

    Raises:
        ConfigError: a parameter has no dimensions.
    """
    if scalars := [name for name, parameter in model.named_parameters() if parameter.dim() == 0]:
        raise ConfigError(
            f"strategy={strategy}: cannot shard the parameter {scalars[0]}, which has no dimensions. Give it the shape [1], or "
            "use another strategy, for example ddp"
        )


def tied(model: nn.Module, units: list[nn.Module]) -> list[str]:
    """Return the names of a parameter that belongs to modules of two units, and so would be in two shards; [] if there is none.

    Args:
        units: as returned by `units`; a module belongs to the innermost unit that contains it, or to the model itself.
    """
    unit_of: dict[nn.Module, nn.Module] = {}
    for unit in [*units, model]:
        for module in unit.modules():
            unit_of.setdefault(module, unit)
    first: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            unit, other = first.setdefault(parameter, (unit_of[module], name))
            if unit is not unit_of[module]:
                return [other, name]
    return []


def require_own_parameters(model: Chain) -> None:
    """Check that no two modules share a parameter.

    Raises:
        ConfigError: two do. With uneven shards the last rank would never update its shard (pytorch#176076).
    """
    for first, name, *_ in shared(model):
        raise ConfigError(
            f"strategy=mesh: {name} is the same parameter as {first}, which torch does not always update if it is sharded "
            "(pytorch#176076). Use a copy, or another strategy, for example ddp"
        )


def shared(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def require_whole(model: Chain, place_of: Mapping[str, Hashable], strategy: str) -> None:
    """Check that each parameter is in one place only; in each of several it would be a parameter of its own.

    Args:
        place_of: the stage or device of each block, by name.
        strategy: name of the strategy, for the message.

    Raises:
        ConfigError: a parameter belongs to blocks in different places.
    """
    for names in shared(model):
        first, *others = names
        for name in others:
            if place_of[name.split(".")[0]] != place_of[first.split(".")[0]]:
                raise ConfigError(
                    f"strategy={strategy}: {name} is the same parameter as {first}, which is in another stage; each would "
                    "train its own. Use a copy, another number of stages or strategy.cut, or another strategy, for example ddp"
                )
