"""The blocks of a model: parts that its forward pass calls one after the other."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping

from torch import nn

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def kind(block: nn.Module) -> Hashable:
    """Return a value that is the same for blocks of one class with the same modules and shapes."""
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    return modules, tuple(tensor.shape for tensor in block.state_dict().values())


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model that have parameters, by their paths.

    Those of a Sequential, and so of a Chain, are its children. Of another model they are the
    elements of lists of modules, of which several have the same class. If half of these elements
    are alike, as the layers of a language model, they are blocks. Else lists within them are
    searched, as the stages of a ConvNeXt.
    """
    if isinstance(model, nn.Sequential):
        return {name: block for name, block in model.named_children() if has_parameters(block)}
    return dict(_blocks_within(model, ""))


def has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _blocks_within(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks within a module that is none itself, and their paths.

    Args:
        path: of the module, with a dot at the end if it is not the model.
    """
    elements = _elements(module)
    if _are_alike(elements):
        yield from ((f"{path}{name}", element) for name, element in elements.items())
        return
    is_list = max(Counter(map(type, elements.values())).values(), default=0) > 1
    for name, child in module.named_children():
        is_block = is_list and not isinstance(child, LISTS)
        if is_block and not any(_are_alike(_elements(part)) for part in child.modules()):
            if name in elements:
                yield f"{path}{name}", child
            continue
        within = [*_blocks_within(child, f"{path}{name}.")]
        yield from within
        if not within and is_list and name in elements:
            yield f"{path}{name}", child


def _are_alike(elements: Mapping[str, nn.Module]) -> bool:
    """Return whether at least half of the elements of a list, and at least two, are of one kind."""
    equal = max(Counter(map(kind, elements.values())).values(), default=0)
    return equal > 1 and 2 * equal >= len(elements)


def _elements(module: nn.Module) -> dict[str, nn.Module]:
    """Return the elements of a list of modules that may be blocks; none of another module.

    Layers of torch, such as the convolutions of a Sequential, are no blocks.
    """
    if not isinstance(module, LISTS):
        return {}
    return {
        name: element
        for name, element in module.named_children()
        if has_parameters(element) and any(True for _ in element.children())
    }
