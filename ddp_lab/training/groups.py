"""Groups of parameters by name: `optimizer.groups` and `optimizer.layer_decay`.

The names are those of the complete model, so that the group of a parameter is the same under every
strategy. A rank that has none of the parameters of a group has the group all the same, without
parameters: checkpoints and schedules count the groups.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from ddp_lab.config.errors import count, is_or_are
from ddp_lab.training.default_group import DefaultGroup
from ddp_lab.training.group_entries import Entry, check_entries, decides, match_names
from ddp_lab.training.grouped_optimizer import GroupedOptimizer
from ddp_lab.training.layer_decay import layer_scales
from ddp_lab.training.optimizer import MakeOptimizer


class Kind(NamedTuple):
    """What decides about the group of a parameter.

    Attributes:
        place: number of the entry that matches it, from 1; 0: none does.
        scale: factor of its learning rate by `optimizer.layer_decay`.
        is_default: whether it has options by the class of the optimizer.
    """

    place: int
    scale: float
    is_default: bool


class ParameterGroups(NamedTuple):
    """The options of the groups, and the group of each parameter.

    Attributes:
        options: what differs from the default in each group. The first one is the default group,
            which is empty.
        places: of the group of each parameter in `options`, by each of the parameter's names.
        notes: lines for the log.
    """

    options: Sequence[Mapping[str, Any]]
    places: Mapping[str, int]
    notes: list[str]

    def bind(self, make: MakeOptimizer, modules: Iterable[nn.Module]) -> "GroupedOptimizer":
        """Return the function of parameters that makes the optimizer with these groups.

        Args:
            make: makes an optimizer of groups of parameters.
            modules: those that have the parameters, under their names in the model.
        """
        places = {
            id(parameter): self.places[name]
            for module in modules
            for name, parameter in module.named_parameters()
        }
        return GroupedOptimizer(make, self.options, places)

    def each(self, make: MakeOptimizer) -> "list[GroupedOptimizer]":
        """Return functions that make an optimizer of any parameters, with the options of a group.

        There is one for each group.
        """
        return [GroupedOptimizer(make, [options], {}) for options in self.options]


def make_groups(
    model: nn.Module,
    entries: Sequence[Mapping[str, Any]],
    layer_decay: float | None,
    lr: float,
    by_default: DefaultGroup | None = None,
) -> ParameterGroups:
    """Return the groups of a model's parameters.

    Args:
        model: the complete model.
        entries: `optimizer.groups`; a parameter is in the group of the first one that matches it.
        layer_decay: factor of the learning rate from a block to the one before it; None: there is
            none.
        lr: learning rate of the default group, at the highest point of the schedule.
        by_default: options of some parameters, before those of the entries; None: there are none.

    Raises:
        ConfigError: a pattern matches no parameter, or only those of earlier ones; or the model has
            no blocks.
    """
    by_default = by_default or DefaultGroup({}, ())
    names = names_of(model)
    chosen = [Entry.of(values) for values in entries]
    matched = match_names(names, chosen)
    scales = dict.fromkeys(names, 1.0)
    if layer_decay is not None:
        scales = layer_scales(model, layer_decay)

    # The default group is the first one, whose learning rate is shown.
    kind_of = {
        name: Kind(matched[name], scales[name], not {*aliases}.isdisjoint(by_default.names))
        for name, aliases in names.items()
    }
    kinds = dict.fromkeys([Kind(0, 1.0, False), *kind_of.values()])
    ordered = sorted(kinds, key=lambda kind: (kind.place, -kind.scale, kind.is_default))
    options: list[dict[str, Any]] = []
    for kind in ordered:
        entry = chosen[kind.place - 1] if kind.place else Entry("*", 1.0, {})
        factor = entry.lr_scale * kind.scale
        rate = {} if factor == 1 else {"lr": lr * factor}
        of_class = by_default.options if kind.is_default else {}
        options.append({**of_class, **rate, **entry.options})

    numbers = {kind: number for number, kind in enumerate(ordered)}
    places = {alias: numbers[kind_of[name]] for name, aliases in names.items() for alias in aliases}
    notes = describe(names, chosen, matched, scales)
    notes += check_entries(model, chosen, matched, by_default)
    deciding = {number for number, entry in enumerate(chosen, 1) if decides(entry, by_default)}
    of_class = sum(kind.is_default and kind.place not in deciding for kind in kind_of.values())
    if of_class:
        shown = ", ".join(f"{key}={value}" for key, value in by_default.options.items())
        notes.append(f"optimizer: {of_class} of {count(len(names), 'parameter')} get {shown}")
    return ParameterGroups(options, places, notes)


def names_of(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter, by the first one. Tied parameters have several."""
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), []).append(name)
    return {aliases[0]: aliases for aliases in by_parameter.values()}


def describe(
    names: Iterable[str],
    entries: Sequence[Entry],
    matched: Mapping[str, int],
    scales: Mapping[str, float],
) -> list[str]:
    """Return lines for the log about the number of parameters in each group."""
    lines: list[str] = []
    counts = [0] * (1 + len(entries))
    for name in names:
        counts[matched[name]] += 1
    if entries:
        parts = [
            f"{count(number, 'parameter')} {'matches' if number == 1 else 'match'} {entry.match}"
            for entry, number in zip(entries, counts[1:], strict=True)
        ]
        lines.append(
            f"optimizer.groups: {', '.join(parts)}; {counts[0]} {is_or_are(counts[0])} in the "
            "default group, whose learning rate is shown"
        )
    if len({*scales.values()}) > 1:
        smallest = min(scales.values())
        lines.append(
            f"optimizer.layer_decay: {len({*scales.values()})} layers, of which the first one has "
            f"{smallest:.4g} times the learning rate of the last one, which is shown"
        )
    return lines
