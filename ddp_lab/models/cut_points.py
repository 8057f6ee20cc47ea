"""Where a module that is no Chain can be cut into stages: before its blocks, in their order.

The candidates are modules that a forward pass calls exactly once. A list of modules stands for its
elements, and a module that contains a list stands for its children, down to the blocks: in a
language model these are the embedding, each layer, the last norm and the head. A block that has
more than half of the FLOPs of a stage is divided further, if it contains a list.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.trees import Tree
from ddp_lab.models.blocks import LISTS
from ddp_lab.models.calls import call
from ddp_lab.models.partition import cut


class CutPoints:
    """An assignment of consecutive parts of a module to stages.

    Args:
        model: on a device without data; it stays as it is.
        example: inputs of some samples, there.
        cut_at: number of stages, which are cut by FLOPs; or paths of the modules with which the
            second stage, the third and so on begin.

    Attributes:
        names: paths of the modules that may begin a stage, in the order of their calls.
        flops: FLOPs of the forward pass from the call of each to that of the next one. Those
            before the first belong to the first.
        parts: indices of each stage's modules.

    Raises:
        ConfigError: there are fewer of them than stages, or `cut_at` does not describe a cut.
    """

    def __init__(self, model: nn.Module, example: Tree, cut_at: int | Sequence[str]):
        begins, total = trace_calls(model, example)
        stages = cut_at if isinstance(cut_at, int) else len(cut_at) + 1
        if isinstance(cut_at, int):
            spent = spent_within(begins, total)
            self.names = sorted(expand(model, spent, total / (2 * stages)), key=begins.__getitem__)
        else:
            self._require_paths(model, [*begins], cut_at)
            self.names = ["", *cut_at]
            begins[""] = 0
        if stages > len(self.names):
            raise ConfigError(
                f"the model cannot be cut into {stages} stages: only {len(self.names)} of its "
                f"modules can begin one ({', '.join(self.names)}), because a forward pass must "
                "call such a module exactly once. Use fewer ranks or devices, or another strategy"
            )
        bounds = [0, *(begins[name] for name in self.names[1:]), total]
        self.flops = [end - start for start, end in pairwise(bounds)]
        self.parts = [range(stage, stage + 1) for stage in range(stages)]
        if isinstance(cut_at, int):
            self.parts = cut(self.flops, stages)

    def _require_paths(self, model: nn.Module, called: list[str], paths: Sequence[str]) -> None:
        """Raise a ConfigError unless paths are modules that are called once, in this order."""
        written = f"strategy.cut=[{','.join(paths)}]"
        modules = dict(model.named_modules())
        for path in paths:
            if path not in modules or not path:
                from difflib import get_close_matches

                near = get_close_matches(path, [*modules], 3, 0.0)
                raise ConfigError(
                    f"{written}: the model has no module {path}. Use the path of a module, for "
                    f"example {', '.join(near)}"
                )
            if path not in called:
                raise ConfigError(
                    f"{written}: a forward pass does not call {path} exactly once, so no stage can "
                    "begin with it. Use the path of another module, for example of an element of "
                    "its list of blocks"
                )
        if sorted(paths, key=called.index) != [*paths] or len({*paths}) != len(paths):
            raise ConfigError(f"{written}: must be modules in the order of their calls, each once")

    @property
    def starts(self) -> list[str]:
        """Paths of the modules with which the second stage, the third and so on begin."""
        return [self.names[part.start] for part in self.parts[1:]]

    @property
    def shares(self) -> list[float]:
        """Each stage's fraction of the FLOPs."""
        total = max(1, sum(self.flops))
        return [sum(self.flops[index] for index in part) / total for part in self.parts]

    def describe(self, places: Sequence[object]) -> str:
        """Return a line with the first module of each stage, its place, and its FLOPs."""
        starts = ["the beginning", *self.starts]
        return ", ".join(
            f"from {start} on {place} ({share:.0%} of the FLOPs)"
            for start, place, share in zip(starts, places, self.shares, strict=True)
        )


def trace_calls(model: nn.Module, example: Tree) -> tuple[dict[str, int], int]:
    """Run a forward pass, and count its FLOPs.

    Returns:
        The FLOPs before the call of each module that is called exactly once, by its path in the
        order of the calls; and those of the pass.
    """
    begins: dict[str, int] = {}
    several: set[str] = set()
    with ExitStack() as hooks, torch.no_grad(), FlopCounterMode(display=False) as counter:
        for path, module in model.named_modules():

            def enter(*_: object, path: str = path) -> None:
                if path in begins:
                    several.add(path)
                begins.setdefault(path, counter.get_total_flops())

            hooks.callback(module.register_forward_pre_hook(enter).remove)
        call(model, example)
        total = counter.get_total_flops()
    return {path: flops for path, flops in begins.items() if path not in several and path}, total


def spent_within(begins: dict[str, int], total: int) -> dict[str, int]:
    """Return the FLOPs from the call of each module to the next one that is not within it."""
    order = [*begins]
    spent: dict[str, int] = {}
    for place, path in enumerate(order):
        after = (begins[other] for other in order[place + 1 :] if not is_within(other, path))
        spent[path] = next(after, total) - begins[path]
    return spent


def is_within(path: str, other: str) -> bool:
    return path.startswith(f"{other}.")


def expand(module: nn.Module, spent: dict[str, int], most: float, path: str = "") -> Iterator[str]:
    """Yield the paths of the modules within `module` that may begin a stage.

    Args:
        module: the model, or a part of it that is divided.
        spent: FLOPs by the path of each module that is called exactly once.
        most: FLOPs of an element of a list that is not divided further.
        path: of `module`.
    """
    of_list = isinstance(module, LISTS)
    for key, child in module.named_children():
        inner = f"{path}.{key}" if path else key
        is_small = of_list and spent.get(inner, 0) <= most
        has_list = any(isinstance(part, LISTS) for part in child.modules())
        if isinstance(child, LISTS) or (has_list and not is_small):
            yield from expand(child, spent, most, inner)
        elif inner in spent:
            yield inner
