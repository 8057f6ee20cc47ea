"""The numbers and texts that modules keep as attributes, besides their tensors."""

from collections.abc import Mapping

from torch import nn

Plain = int | float | str | None
Place = tuple[str, str]  # the path of a module, and the name of its attribute


def plain_attributes(model: nn.Module) -> dict[Place, Plain]:
    """Return the numbers and texts among the attributes of a model's modules, by place.

    The mode of training is none of them.
    """
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (int, float, str, type(None))) and name != "training"
    }


def restore_attributes(model: nn.Module, values: Mapping[Place, Plain]) -> None:
    """Give attributes the values that `plain_attributes` has returned, where they differ."""
    for (path, name), value in values.items():
        module = model.get_submodule(path)
        if vars(module).get(name) != value:
            setattr(module, name, value)


def changed_attributes(before: Mapping[Place, Plain], after: Mapping[Place, Plain]) -> list[Place]:
    """Return the places of the attributes that have another value, or had none."""
    missing = object()
    return [place for place, value in after.items() if before.get(place, missing) != value]


def describe(place: Place) -> str:
    """Return the name of an attribute, for a message."""
    path, name = place
    return f"the attribute {name} of the module {path}" if path else name
