"""Groups of parameters by name: `optimizer.groups` and `optimizer.layer_decay`.

The names are those of the complete model, so that the group of a parameter is the same under every
strategy. A rank that has none of the parameters of a group has the group all the same, without
parameters: checkpoints and schedules count the groups.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError, count, is_or_are
from ddp_lab.models.blocks import blocks_of

MakeOptimizer = Callable[..., torch.optim.Optimizer]
NAMES_SHOWN = 5


class Entry(NamedTuple):
    """An entry of `optimizer.groups`.

    Attributes:
        match: pattern of names of parameters.
        lr_scale: factor of the learning rate.
        options: other options of the optimizer's class.
    """

    match: str
    lr_scale: float
    options: Mapping[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Entry":
        """Return an entry from its values in the config, where a list stands for a tuple."""
        options = {
            key: tuple(cast("list[Any]", value)) if isinstance(value, list) else value
            for key, value in values.items()
            if key not in ("match", "lr_scale")
        }
        return cls(values["match"], values.get("lr_scale", 1.0), options)


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


class GroupedOptimizer(NamedTuple):
    """A function of parameters, or of groups of them, that divides each into groups by name.

    Attributes:
        make: makes the optimizer of the groups.
        options: of each group.
        places: of the group of a parameter in `options`, by the identity of the parameter. Others
            are in the first group.
    """

    make: MakeOptimizer
    options: Sequence[Mapping[str, Any]]
    places: Mapping[int, int]

    def __call__(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Return the optimizer.

        Args:
            parameters: a list of parameters, or dicts with the key params. Their other options
                count where the group by name does not have them.
        """
        incoming: list[Any] = [*parameters]
        if not (incoming and isinstance(incoming[0], dict)):
            incoming = [{"params": incoming}]
        divided: list[dict[str, Any]] = []
        for place, options in enumerate(self.options):
            for group in cast("list[dict[str, Any]]", incoming):
                members = [each for each in group["params"] if self._place_of(each) == place]
                divided.append({**group, **options, "params": members})
        return self.make(divided)

    def _place_of(self, parameter: nn.Parameter) -> int:
        return self.places.get(id(parameter), 0)


class DefaultGroup(NamedTuple):
    """Options that the class of an optimizer gives some parameters of a model by itself.

    Attributes:
        options: of the group.
        names: of its parameters in the model.
        check: of the class: gets the options of an entry and the shapes of the parameters that it
            matches, by name. It returns a line for the log, or None, and raises a ValueError if the
            options do not fit. None: there is nothing to be checked.
    """

    options: Mapping[str, Any]
    names: Collection[str]
    check: Callable[[Mapping[str, Any], Mapping[str, torch.Size]], str | None] | None = None

    @classmethod
    def of(cls, kind: Any, model: nn.Module) -> "DefaultGroup":
        """Return the group of an optimizer's class.

        It is empty, if the class has no method `default_groups`.

        Args:
            kind: the class.
            model: the complete model.
        """
        choose = getattr(kind, "default_groups", None)
        if choose is None:
            return cls({}, ())
        options, names = choose(model)
        return cls(options, names, getattr(kind, "check_group", None))


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


def decides(entry: Entry, by_default: DefaultGroup) -> bool:
    """Return whether an entry has an option that the class of the optimizer gives by itself."""
    return not entry.options.keys().isdisjoint(by_default.options)


def check_entries(
    model: nn.Module,
    entries: Sequence[Entry],
    matched: Mapping[str, int],
    by_default: DefaultGroup,
) -> list[str]:
    """Check the options of entries for their parameters, and return lines for the log.

    Args:
        model: the complete model.
        entries: the entries of `optimizer.groups`.
        matched: number of the entry of each parameter, from `match_names`.
        by_default: with the check of the optimizer's class.

    Raises:
        ConfigError: the options do not fit the parameters.
    """
    if by_default.check is None:
        return []
    notes: list[str] = []
    for number, entry in enumerate(entries, 1):
        shapes = {
            name: model.get_parameter(name).shape
            for name, place in matched.items()
            if place == number
        }
        key = f"optimizer.groups[{number - 1}]"
        try:
            note = by_default.check(entry.options, shapes)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None
        if note is not None:
            notes.append(f"{key}: {note}")
    return notes


def names_of(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter, by the first one. Tied parameters have several."""
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), []).append(name)
    return {aliases[0]: aliases for aliases in by_parameter.values()}


def match_names(names: Mapping[str, Sequence[str]], entries: Sequence[Entry]) -> dict[str, int]:
    """Return the number of the first entry, from 1, that matches each parameter; 0 without one.

    Args:
        names: from `names_of`. A pattern matches a parameter by any of its names.
        entries: the entries of `optimizer.groups`.

    Raises:
        ConfigError: an entry has no parameter.
    """
    first: dict[str, int] = {}
    for number, entry in enumerate(entries, 1):
        matching = [
            name
            for name, aliases in names.items()
            if any(fnmatchcase(alias, entry.match) for alias in aliases)
        ]
        fresh = [name for name in matching if name not in first]
        if not fresh:
            key = f"optimizer.groups[{number - 1}].match={entry.match}"
            raise ConfigError(f"{key}: {explain_empty(entry.match, matching, first, names)}")
        first |= dict.fromkeys(fresh, number)
    return {name: first.get(name, 0) for name in names}


def explain_empty(
    pattern: str, matching: Sequence[str], first: Mapping[str, int], names: Iterable[str]
) -> str:
    """Return why a pattern has no parameter of its own.

    Args:
        pattern: of an entry.
        matching: names that match it.
        first: number of the entry that has each of them.
        names: of all parameters.
    """
    if matching:
        earlier = sorted({first[name] - 1 for name in matching})
        text = " and ".join(f"optimizer.groups[{place}]" for place in earlier)
        return (
            f"all parameters that match are in {text} already, because the first entry that "
            "matches a parameter counts. Place this one before it, or remove it"
        )
    every = [*names]
    plain = pattern.strip("*?.")
    near = [name for name in every if plain and plain in name]
    near = near or difflib.get_close_matches(plain, every, n=NAMES_SHOWN, cutoff=0.3) or every
    return (
        "matches no parameter of the model. Use a name or a pattern of names, for example of "
        f"{', '.join(near[:NAMES_SHOWN])}"
    )


def layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Return the factor of the learning rate of each parameter, by its first name.

    It is 1 for the last parameters of the model, and `decay` times smaller for each block before
    them, as in timm. What comes before the first block is one more layer, and so is what follows
    the last one, in the order in which the model registers its parameters.

    Args:
        model: the complete model.
        decay: the factor.

    Raises:
        ConfigError: the model has no blocks.
    """
    blocks = [*blocks_of(model)]
    depths: dict[str, int] = {}
    depth = 0
    for name, _ in model.named_parameters():
        within = [place for place, path in enumerate(blocks, 1) if name.startswith(f"{path}.")]
        if within:
            depth = within[0]
        elif depth == len(blocks):
            depth += 1
        depths[name] = depth
    order = sorted({*depths.values()})
    if len(blocks) < 2 or len(order) < 2:
        raise ConfigError(
            f"optimizer.layer_decay={decay:g}: {type(model).__name__} has no blocks, which would "
            "be the elements of an nn.Sequential or nn.ModuleList. Use optimizer.groups, with a "
            "lr_scale for each pattern of names"
        )
    return {name: decay ** (len(order) - 1 - order.index(each)) for name, each in depths.items()}


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
