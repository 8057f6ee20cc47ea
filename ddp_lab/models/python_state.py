"""The numbers and texts that modules keep as attributes, besides their tensors."""

from collections.abc import Mapping

from torch import nn

Plain = int | float | str | None
PLAIN = (int, float, str, type(None))
Place = tuple[str, str]  # the path of a module, and the name of its attribute


def plain_attributes(model: nn.Module) -> dict[Place, Plain]:
    """Return the numbers and texts among the attributes of a model's modules, by place.

    The mode of training is none of them.
    """
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, PLAIN) and name != "training"
    }


def restore_attributes(model: nn.Module, values: Mapping[Place, Plain]) -> None:
    """Give attributes the values that `plain_attributes` has returned, where they differ.

    One that has become something else, such as a table that the first pass has made, stays.
    """
    for (path, name), value in values.items():
        module = model.get_submodule(path)
        present = vars(module).get(name, ...)
        if present is not value and isinstance(present, PLAIN):
            setattr(module, name, value)


def changed_attributes(before: Mapping[Place, Plain], after: Mapping[Place, Plain]) -> list[Place]:
    """Return the places of the attributes that have another value, or had none."""
    # repr, because NaN does not equal itself
    return [place for place, value in after.items() if repr(before.get(place, ...)) != repr(value)]


def describe(place: Place) -> str:
    """Return the name of an attribute, for a message."""
    path, name = place
    return f"the attribute {name} of the module {path}" if path else name
