"""The entries of `optimizer.groups`: which parameters each matches, and whether its options fit."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.training.default_group import DefaultGroup

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
