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
from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist

from ddp_lab.config.errors import TrainingError
from ddp_lab.strategies.unit_advice import Advice
from ddp_lab.world.ranks import Ranks

END = "the end of the pass"
WHOLE = "the model"
BACKWARD = "the backward pass of "
SUM = "the sum of the gradients of "
PAUSE = 0.0002, 0.05  # seconds between the first two looks at the store, which grow, and the most
_numbers = itertools.count()  # of sharded models, which every rank makes in the same order


class UnitOrder:
    """The order in which all ranks use the units of a model.

    Args:
        ranks: this rank and the others.
        strategy: for the messages.
        advice: what the messages recommend; None: another strategy.
        group: numbers of the ranks that share the units, this one among them; None: all.

    Attributes:
        without_gradient: names of the units whose inputs have needed no gradient in this pass.
    """

    def __init__(
        self, ranks: Ranks, strategy: str, advice: Advice | None, group: Sequence[int] | None = None
    ):
        self.ranks = ranks
        self.strategy = strategy
        self.advice = advice
        self.group = range(ranks.world_size) if group is None else group
        self.without_gradient = set[str]()
        self.is_active = len(self.group) > 1 and dist.get_backend() != "fake"
        self._prefix = f"units/{next(_numbers)}/{self.group[0]}"
        self._known: dict[Any, Any] = {}  # the events that may follow an event, by name, and so on
        self._place: dict[Any, Any] = {}
        self._number = 0
        self._events: list[str] = []  # of this pass
        self._asked: list[str] = []

    def begin(self, kind: object) -> None:
        """Begin a forward pass. Each kind, for example that of training, has a path of its own."""
        self._number += 1
        self._events.clear()
        self.without_gradient.clear()
        self._place = self._known.setdefault(kind, {})

    def event(self, name: str) -> None:
        """Return when it is known that every rank has this event next.

        Raises:
            TrainingError: another rank has another one.
        """
        if not self.is_active:
            return
        self._events.append(name)
        if list(self._place) != [name]:
            self._ask(name)
        self._place = self._place.setdefault(name, {})

    def _ask(self, name: str) -> None:
        """Wait until every rank has asked for the same event. The last one answers."""
        ranks = self.ranks
        store = self.ranks.store
        key = f"{self._prefix}/{self._number}/{len(self._events)}"
        answer = f"{key}/answer"
        mine = json.dumps([ranks.rank, name, sorted(self.without_gradient)])
        rank, expected, without_gradient = json.loads(store.compare_set(f"{key}/first", "", mine))
        if expected != name:
            differing = self.without_gradient.symmetric_difference(without_gradient)
            message = self._describe(rank, expected, name, differing)
            store.set(answer, message)
            raise TrainingError(message, rank=ranks.rank)

        if store.add(f"{key}/count", 1) == len(self.group):
            store.set(answer, "")
        answer_found = self._wait(answer, name)
        if answer_found:
            raise TrainingError(answer_found, rank=ranks.rank)

        if ranks.rank == self.group[0]:  # all ranks have read the answers to what was asked before
            for old in self._asked:
                for part in ("first", "count", "answer"):
                    store.delete_key(f"{old}/{part}")
            self._asked = [key]

    def _wait(self, answer: str, name: str) -> str:
        """Return the answer, or a message if the others have gone on with another event."""
        store = self.ranks.store
        pause = PAUSE[0]
        # before the other ranks' collectives time out
        limit = self.ranks.timeout.total_seconds() / 2
        deadline = time.monotonic() + limit
        while not store.check([answer]):
            if time.monotonic() > deadline:
                usual = next(iter(self._place), END)
                return (
                    self._describe(None, usual, name, ())
                    + f" (Rank {self.ranks.rank} has waited for {limit:g} s.)"
                )
            time.sleep(pause)
            pause = min(2 * pause, PAUSE[1])
        return store.get(answer).decode()

    def _describe(
        self, rank: int | None, expected: str, name: str, differing: Collection[str]
    ) -> str:
        """Return the message that this rank has another event next than `rank`, or the others.

        Args:
            rank: with the other event; None: one that has waited does not know it.
            expected: the other event.
            name: this rank's event.
            differing: names of the units whose inputs need a gradient on one of the ranks only.
        """
        others = "the others" if rank is None else f"rank {rank}"
        difference = (
            f"strategy={self.strategy}: rank {self.ranks.rank} comes to {name}, but {others} to "
            f"{expected}. "
        )
        both = expected + name
        if self.advice is None:
            return (
                f"{difference}All ranks must sum the gradients of the blocks in the same order, so "
                "the backward pass must reach the same blocks on all ranks, and not stop at a "
                "detached tensor on some of them. Use another strategy, for example ddp with "
                "strategy.find_unused_parameters=true"
            )

        units = {unit_of(event) for event in (expected, name)} - {END, WHOLE}
        if not units:
            return (
                f"{difference}All ranks must call the model equally often and in the same mode, "
                "because each call gathers its parameters from all ranks. Call step, evaluate and "
                "predict on all ranks, in the same order"
            )

        if SUM in both:
            late = {unit_of(event) for event in (expected, name) if SUM in event}.union(differing)
            return (
                f"{difference}All ranks must sum the gradients of the units in the same order, so "
                "the inputs of a unit must need a gradient on all ranks or on none. Gather such "
                "units together with the module around them: use "
                f"{self.advice.keep(late - {WHOLE})}"
            )

        is_backward = BACKWARD in both
        phase = BACKWARD if is_backward else ""
        before = {unit_of(event) for event in self._events[:-1] if event.startswith(phase)}
        left_out = self.advice.left_out(units, before, is_backward)
        return (
            f"{difference}All ranks must use the same units of the model in a step, because each "
            "use gathers the unit's parameters from all ranks. Gather those that only some ranks "
            f"use together with the module around them: use {self.advice.keep_alike(left_out)}"
        )


def unit_of(event: str) -> str:
    """Return the name of the unit of an event."""
    return event.removeprefix(BACKWARD).removeprefix(SUM)
