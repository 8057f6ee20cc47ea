"""What messages recommend for `strategy.keep_whole`: the list to write, with what is given now."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    """The names that a recommendation for `strategy.keep_whole` is made of.

    Attributes:
        modules: names of the model's modules, in the order of their definition.
        units: names of its units.
        from_user: patterns that `strategy.keep_whole` has now.
    """

    modules: Sequence[str]
    units: Collection[str]
    from_user: Sequence[str] = ()

    def keep(self, names: Collection[str]) -> str:
        """Return the option to keep these modules whole, too, on the command line and in a Lab."""
        added = sorted(names, key=self.modules.index)
        patterns = list(dict.fromkeys([*self.from_user, *added]))
        quoted = ", ".join(f'"{pattern}"' for pattern in patterns)
        return f"strategy.keep_whole=[{','.join(patterns)}], in a Lab keep_whole=[{quoted}]"

    def keep_alike(self, names: Collection[str]) -> str:
        """Return the option that also keeps these modules whole, and those of the same lists.

        What a step leaves out of a list varies: after one expert of a layer it is another one, or
        one of another layer.
        """
        added = sorted(names, key=self.modules.index)
        patterns = [self._pattern(name, names) for name in added]
        return Advice([*self.modules, *patterns], self.units, self.from_user).keep(patterns)

    def _pattern(self, name: str, others: Collection[str]) -> str:
        parent, _, own_name = name.rpartition(".")
        are_siblings = any(other != name and other.rpartition(".")[0] == parent for other in others)
        if not parent or not (own_name.isdigit() or are_siblings):
            return name
        parts = ["*" if part.isdigit() else part for part in parent.split(".")]
        return ".".join([*parts, "*"])

    def left_out(
        self, events: Collection[str], used: Collection[str], is_backward: bool
    ) -> list[str]:
        """Return the units that one of two ranks leaves out, which come to different events.

        It has left out what the model defines from the one event to the other. In a backward pass
        the order is the reverse one. A unit that one rank uses again is the one to name.

        Args:
            events: names of the units that the two ranks come to: two, or one of a rank if the
                other one comes to the end.
            used: names of the units that have had their event in this pass.
            is_backward: whether the events are those of a backward pass.
        """
        repeated = [name for name in events if name in used]
        if repeated:
            return repeated
        places = sorted(map(self.modules.index, events))
        if len(places) == 1:
            places = [-1, *places] if is_backward else [*places, len(self.modules)]
        first, last = places
        between = self.modules[first + 1 : last + 1] if is_backward else self.modules[first:last]
        return [name for name in between if name in {*self.units, *events} and name not in used]
