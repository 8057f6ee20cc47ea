"""The units of FSDP: the modules whose parameters are gathered together."""

from torch import nn


def is_list(module: nn.Module) -> bool:
    """Return whether a module is a list of blocks: a ModuleList, or an nn.Sequential with several blocks of one class.

    A block has modules of its own and is no nn.Sequential. An nn.Sequential of such lists is a list, too.
    """
    if not isinstance(module, nn.Sequential):
        return isinstance(module, nn.ModuleList)
    blocks = [child for child in module.children() if not isinstance(child, nn.Sequential) and any(child.children())]
    return len({type(block) for block in blocks}) < len(blocks) or any(map(is_list, module.children()))


def units(model: nn.Module, wrap: list[str] | None) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together, inner modules before those that contain them.

    Args:
        wrap: names of their classes; None: the children of the model and of its lists of blocks that have parameters.
    """
    if wrap is not None:
        found = [module for module in model.modules() if type(module).__name__ in wrap and module is not model]
    else:
        parents = [model, *filter(is_list, model.modules())]
        found = [child for parent in parents for child in parent.children() if any(True for _ in child.parameters())]
        found = [child for child in found if not is_list(child)]
    depth = {module: name.count(".") for name, module in model.named_modules()}
    return sorted(dict.fromkeys(found), key=lambda module: -depth[module])
