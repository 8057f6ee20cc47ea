"""Whether all ranks of a Lab make the same calls, so that a rank that leaves a loop early is named.

A rank that takes fewer steps than the others, or evaluates while they still train, lets them wait
in a collective for ever: neither gloo nor NCCL knows who has left. Each rank therefore says in the
store which call it makes after how many steps, and a thread of each looks at what the others say.

    rank 0   steps 1, 2, 3, 4 ...                       has begun step 4: nobody takes part in it
    rank 1   steps 1, 2, 3, "evaluate after 3 steps"
"""

import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from ddp_lab.config.causes import WAIT_FOR_CAUSE
from ddp_lab.config.errors import ConfigError, first_few
from ddp_lab.training.hooks import Hook, Run
from ddp_lab.world.process import is_alive, show
from ddp_lab.world.runtime import Runtime

KEYS = "calls"  # the beginning of the keys in the store
LOOK = 0.5  # seconds between two looks at the other ranks
GRACE = 1.5  # seconds in which a rank may fail by itself in the collective that others have left
# seconds for which the rank that keeps the store lets the others read why it has left
OWNER_GRACE = 2.0
LISTED = 8  # the most ranks that a message names
ADVICE = (
    "Every rank must take the same steps and call the same methods in the same order. End a loop "
    "on all ranks after the same step, by a value that all of them have, such as the loss that "
    "`step` returns or the metrics of `evaluate`"
)


class Said(NamedTuple):
    """What a rank has said of its last call.

    Attributes:
        calls: number of its calls, in which steps do not count.
        steps: steps that it had begun before.
        message: the call and where it was, for example "called evaluate after step 3 (epoch 1)".
        facts: what must be equal on all ranks, by its name.
        waits: whether it waits for the other ranks to make the same call; False: it has left.
    """

    calls: int
    steps: int
    message: str
    facts: dict[str, Any]
    waits: bool


NOTHING = Said(0, 0, "", {}, waits=True)


class Calls:
    """The calls of this rank, and a thread that compares them with those of the others.

    Args:
        runtime: this rank; with one rank nothing is done.

    """

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self._calls = 0
        self._message = "has entered the `with` block of its Lab"
        self._steps = 0
        self._steps_before = 0  # the last call
        self._step = 0  # number in the run of the step that was begun last
        self._epoch = 0  # of that step
        self._difference = ""  # what the thread has found
        self._others = [rank for rank in range(runtime.world_size) if rank != runtime.rank]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Connect to the other ranks, and start the thread. Collective."""
        if not self._others:
            return
        self._store.set(
            f"process/{self.runtime.rank}", json.dumps([os.getpid(), self.runtime.node])
        )
        watched = self.runtime.connect(KEYS)
        self._thread = threading.Thread(
            target=self._watch, args=(watched,), name="calls", daemon=True
        )
        self._thread.start()

    def begin_step(self, step: int, epoch: int) -> None:
        """Count a step that begins.

        Args:
            step: its number in the run.
            epoch: from 1.
        """
        self._steps += 1
        self._step = step
        self._epoch = epoch

    def begin(self, message: str, facts: dict[str, Any] | None = None) -> None:
        """Check that all ranks make the same call now. Collective; it takes about a millisecond.

        Args:
            message: the call, for example "called evaluate".
            facts: what must be equal on all ranks, by its description.

        Raises:
            ConfigError: a rank makes another call, or one after another number of steps, or with
                other facts.
        """
        if self._others:
            said = self._say(message, facts or {}, waits=True)
            self.runtime.gather_and_decide("call", said, require_same_calls)

    def leave(self, message: str) -> None:
        """Say that this rank makes no more calls, and end the thread.

        It does not wait for the others.

        Args:
            message: how it leaves, for example "left the `with` block of its Lab".
        """
        self.close()
        if self._others:
            with suppress(RuntimeError):  # the rank that keeps the store has exited
                self._say(message, {}, waits=False)
                self._keep_store()

    def report(self) -> None:
        """Explain an error of the connections between the ranks, which this rank has got.

        Raises:
            ConfigError: another rank has left, makes other calls, or has exited.
        """
        self.close()
        if not self._others:
            return
        store = self._store
        difference = self._difference or self._find(store)
        if not difference and self.runtime.under_torchrun:
            # if another rank has failed, the launcher ends this one meanwhile
            time.sleep(WAIT_FOR_CAUSE)
            difference = self._find(store) or self._find_exited(store)
        if difference:
            self._wait_unless_first(store)
            raise ConfigError(difference)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def _store(self) -> Store:
        """The store, for the main thread."""
        return PrefixStore(KEYS, self.runtime.store)

    def _say(self, message: str, facts: dict[str, Any], waits: bool) -> Said:
        self._calls += 1
        self._steps_before = self._steps
        place = f"after {self._place()}" if self._steps else "before its first step"
        said = Said(self._calls, self._steps, f"{message} {place}", facts, waits)
        self._message = said.message
        self._store.set(f"said/{self.runtime.rank}", json.dumps(said))
        return said

    def _place(self) -> str:
        return f"step {self._step} (epoch {self._epoch})"

    def _keep_store(self) -> None:
        """Let the others read why this rank has left, if the store closes with its process."""
        runtime = self.runtime
        if runtime.rank > 0 or runtime.agent_keeps_store:
            return
        deadline = time.monotonic() + OWNER_GRACE
        while time.monotonic() < deadline and not all(
            said.waits is False for said in self._said(self._store)
        ):
            time.sleep(LOOK / 5)

    def _watch(self, store: Store) -> None:
        while not self._stop.wait(LOOK):
            self._difference = self._find(store)
            if self._difference:
                break
        if self._difference and not self._stop.wait(GRACE):
            self._wait_unless_first(store)
            # The main thread waits for a rank that does not come, and cannot be interrupted.
            show(f"error: {self._difference}")
            sys.stdout.flush()
            os._exit(1)

    def _wait_unless_first(self, store: Store) -> None:
        """Wait for the end of this process if another rank reports the difference."""
        with suppress(RuntimeError):  # the rank that keeps the store has exited
            if store.add("difference", 1) > 1:
                time.sleep(WAIT_FOR_CAUSE)

    def _said(self, store: Store) -> list[Said]:
        """Return what each other rank has said last; NOTHING of one that has said nothing."""
        keys = [f"said/{rank}" for rank in self._others]
        return [
            Said(*json.loads(store.get(key))) if store.check([key]) else NOTHING for key in keys
        ]

    def _find(self, store: Store) -> str:
        """Return why another rank will not take part in what this one has begun; "" if all may."""
        ranks_by_reason: dict[str, list[int]] = {}
        with suppress(RuntimeError):  # the rank that keeps the store has exited
            for rank, said in zip(self._others, self._said(store), strict=True):
                if self._is_without(said):
                    ranks_by_reason.setdefault(said.message, []).append(rank)
        if not ranks_by_reason:
            return ""
        theirs = ", ".join(
            f"{name_ranks(ranks)} {message}" for message, ranks in ranks_by_reason.items()
        )
        own_call = (
            f"has begun {self._place()}" if self._steps > self._steps_before else self._message
        )
        return f"{theirs}, but rank {self.runtime.rank} {own_call}. {ADVICE}"

    def _is_without(self, said: Said) -> bool:
        """Return whether a rank that has said this will not take part in what this one began."""
        if not said.waits and self._calls >= said.calls:
            return True
        return self._calls < said.calls and self._steps > said.steps

    def _find_exited(self, store: Store) -> str:
        """Return which rank on this node exited without leaving its Lab; "" if none is known."""
        with suppress(RuntimeError):  # the rank that keeps the store has exited
            for rank, said in zip(self._others, self._said(store), strict=True):
                pid, node = json.loads(store.get(f"process/{rank}"))
                if said.waits and node == self.runtime.node and not is_alive(pid):
                    return (
                        f"rank {rank} (pid {pid}) has exited with code 0 in the `with` block of "
                        f"its Lab, for example by os._exit(0), but rank {self.runtime.rank} has "
                        f"begun {self._place()}. {ADVICE}"
                    )
        return ""


@dataclass(eq=False)
class CountedSteps(Hook):
    """The hook that counts the steps of `fit` among the calls of this rank."""

    calls: Calls

    def on_start(self, run: Run) -> None:
        self.run = run

    def before_step(self, batch: Any) -> Any:
        self.calls.begin_step(self.run.position.step + 1, self.run.position.epoch)
        return batch


def require_same_calls(said_by_ranks: list[list[Any]]) -> None:
    """Check that all ranks make the same call, after the same number of steps, with the same facts.

    Args:
        said_by_ranks: what each rank has said, as JSON has it.

    Raises:
        ConfigError: they do not.
    """
    first, *others = [Said(*each) for each in said_by_ranks]
    for rank, said in enumerate(others, 1):
        if (said.message, said.steps) != (first.message, first.steps):
            raise ConfigError(f"rank {rank} {said.message}, but rank 0 {first.message}. {ADVICE}")
        for name, value in said.facts.items():
            if value != first.facts[name]:
                raise ConfigError(
                    f"{name} is {first.facts[name]} on rank 0, but {value} on rank {rank}, which "
                    f"{said.message}. Pass the same on all ranks: of a complete dataset each rank "
                    "reads its own part by itself"
                )


def name_ranks(ranks: list[int]) -> str:
    """Return the names of some ranks, for a message."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {first_few(ranks, LISTED)}"
