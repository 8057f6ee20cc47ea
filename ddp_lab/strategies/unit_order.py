"""Agreement of the ranks on the order in which they use the units of a sharded model.

Every use of a unit is a collective: its parameters are gathered. If a rank leaves out a unit that
others use, or uses another one, their collectives do not match: they hang, or return the parameters
of the wrong unit if the sizes happen to be equal.

The ranks therefore follow a known path of events (forward passes and backward passes of units), in
which there is nothing to ask. Only where the next event is not known, or where the path has divided
before, a rank asks the others through the key-value store before it goes on, which takes about a
millisecond:

    first step      known from then on   step without b: asks at c, and at each event after it
    a  b  c  end    a  b  c  end         a  c  end
"""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ddp_lab.config.errors import TrainingError
from ddp_lab.world.ranks import Ranks

END, WHOLE = "the end of the pass", "the model"
BACKWARD = "the backward pass of "
SUM = "the sum of the gradients of "
PAUSE = 0.0002, 0.05  # seconds between the first two looks at the store, which grow, and the most
_numbers = itertools.count()  # of sharded models, which every rank makes in the same order


class UnitOrder:
    """The order in which all ranks use the units of a model.

    Args:
        ranks: this rank and the others.
        strategy: for the messages.
        names: of the model's modules.
    """

    def __init__(self, ranks: Ranks, strategy: str, names: Sequence[str]):
        self.ranks, self.strategy, self.names = ranks, strategy, names
        self.is_active = ranks.world_size > 1 and dist.get_backend() != "fake"
        self._prefix = f"units/{next(_numbers)}"
        self._known: dict[Any, Any] = {}  # the events that may follow an event, by name, and so on
        self._place: dict[Any, Any] = {}
        self._number, self._event = 0, 0
        self._asked: list[str] = []

    def begin(self, kind: object) -> None:
        """Begin a forward pass. Each kind, for example that of training, has a path of its own."""
        self._number += 1
        self._event = 0
        self._place = self._known.setdefault(kind, {})

    def event(self, name: str) -> None:
        """Return when it is known that every rank has this event next.

        Raises:
            TrainingError: another rank has another one.
        """
        if not self.is_active:
            return
        self._event += 1
        if list(self._place) != [name]:
            self._ask(name)
        self._place = self._place.setdefault(name, {})

    def _ask(self, name: str) -> None:
        """Wait until every rank has asked for the same event. The last one answers."""
        ranks, store = self.ranks, self.ranks.store
        key = f"{self._prefix}/{self._number}/{self._event}"
        answer = f"{key}/answer"
        first = store.compare_set(f"{key}/first", "", json.dumps([ranks.rank, name])).decode()
        rank, expected = json.loads(first)
        if expected != name:
            store.set(answer, message := self._describe(rank, expected, name))
            raise TrainingError(message, rank=ranks.rank)
        if store.add(f"{key}/count", 1) == ranks.world_size:
            store.set(answer, "")
        found = self._wait(answer, name)
        if found:
            raise TrainingError(found, rank=ranks.rank)
        if ranks.rank == 0:  # all ranks have read the answers to what was asked before
            for old in self._asked:
                for part in ("first", "count", "answer"):
                    store.delete_key(f"{old}/{part}")
            self._asked = [key]

    def _wait(self, answer: str, name: str) -> str:
        """Return the answer, or a message if the others have gone on with another event."""
        store, pause = self.ranks.store, PAUSE[0]
        limit = self.ranks.timeout.total_seconds() / 2  # before the other ranks' collectives time out
        deadline = time.monotonic() + limit
        while not store.check([answer]):
            if time.monotonic() > deadline:
                usual = next(iter(self._place), END)
                return self._describe(None, usual, name) + f" (Rank {self.ranks.rank} has waited for {limit:g} s.)"
            time.sleep(pause)
            pause = min(2 * pause, PAUSE[1])
        return store.get(answer).decode()

    def _describe(self, rank: int | None, expected: str, name: str) -> str:
        """Return the message that this rank has another event next than `rank`, or the others."""
        others = "the others" if rank is None else f"rank {rank}"
        events = [event.removeprefix(BACKWARD).removeprefix(SUM) for event in (expected, name)]
        units = {*events} - {END, WHOLE}
        # A rank that leaves out a unit comes to the next: later in the model, or earlier in a backward pass.
        choose = max if BACKWARD in expected + name or SUM in expected + name else min
        difference = f"strategy={self.strategy}: rank {self.ranks.rank} comes to {name}, but {others} to {expected}. "
        if SUM in expected + name:
            return (
                f"{difference}All ranks must sum the gradients of the units in the same order, so the inputs "
                "of a unit must need a gradient on all ranks or on none. Gather it together with the module "
                f"around it, too: add {self._pattern(units, choose)} to strategy.keep_whole"
            )
        return (
            f"{difference}All ranks must use the same units of the model in a step, because each use gathers the unit's "
            "parameters from all ranks. Gather those that only some ranks use together with the module around "
            f"them: strategy.keep_whole=[{self._pattern(units, choose)}]"
        )

    def _pattern(self, units: set[str], choose: Callable[..., str]) -> str:
        """Return a pattern for the first or last of some units and others in the same list."""
        chosen = choose(units, key=self.names.index, default="NAME")
        parent, _, own = chosen.rpartition(".")
        are_siblings = len(units) > 1 and all(unit.rpartition(".")[0] == parent for unit in units)
        in_list = own.isdigit() or are_siblings
        return f"{parent}.*" if parent and in_list else chosen
