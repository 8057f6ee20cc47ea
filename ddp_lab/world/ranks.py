"""This rank among the others of its launch, and what they agree on through the key-value store."""

import json
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

# Documented as torch.distributed.Store etc., but the module does not export them explicitly.
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from ddp_lab.config.errors import ConfigError
from ddp_lab.world.process import Place, env_int, launch_id
from ddp_lab.world.store import DECISION_TIMEOUT, agree_on_attempt

START_TIMEOUT = timedelta(minutes=5)  # the shortest timeout for other ranks to start, which import from a slow disk

Answer = TypeVar("Answer", bound=str | list[Any] | float | None)


class Ranks:
    """The ranks of a launch, seen from this one. Nothing here needs a device or the process group.

    Attributes:
        rank, world_size: Index of this process and number of processes; 0 and 1 without torchrun.
        local_rank, local_world_size: The same, counting only the processes of this machine.
        node, nodes: Index of this machine and number of machines.
        abandoned: Threads that nothing needs any more, but that may still wait for the store.

    Args:
        place: Which rank this is.
        timeout: How long to wait for the store to open.
    """

    def __init__(self, place: Place, timeout: timedelta):
        self.rank, self.world_size = place.rank, place.world_size
        self.local_rank, self.local_world_size = place.local_rank, place.local_world_size
        self.node, self.nodes = place.node, place.nodes
        self.timeout = timeout
        self.abandoned: list[threading.Thread] = []
        self._store: Store | None = None
        self._questions = 0
        self._launch: str | None = None

    @property
    def under_torchrun(self) -> bool:
        """Whether torchrun started this process."""
        return "TORCHELASTIC_RUN_ID" in os.environ

    @property
    def master(self) -> tuple[str, int]:
        """Host and port of the ranks' store."""
        return os.environ.get("MASTER_ADDR", "localhost"), env_int("MASTER_PORT", 29500)

    @property
    def agent_keeps_store(self) -> bool:
        """Whether torchrun's agent opens the store before any rank starts; otherwise rank 0 opens it."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @property
    def store(self) -> Store:
        """The key-value store of the ranks; it can be used before the process group is open. Collective the first time."""
        if self._store is None:
            if self.world_size == 1 and "MASTER_ADDR" not in os.environ:
                self._store = HashStore()
            else:
                store, _, _ = next(rendezvous("env://", self.rank, self.world_size, timeout=self.timeout))
                self._store = PrefixStore(f"attempt_{self._attempt(store)}", store)
        return self._store

    def connect(self, prefix: str) -> Store:
        """Return another connection to the keys of the store that begin with a prefix, for another thread.

        Threads cannot share a connection: a thread that waits for a key would block the others.
        """
        return PrefixStore(prefix, self.store.clone())

    def _attempt(self, store: Store) -> str:
        """Return a name of this start: the agent's store outlives a restart, with the dead ranks' addresses in it."""
        if self.agent_keeps_store:
            return agree_on_attempt(store, self.rank, self.world_size, max(self.timeout, START_TIMEOUT))
        return "0"  # the store is rank 0's, and new at each start

    def agree(self, key: str, decide: Callable[[], Answer], per_node: bool = False) -> Answer:
        """Run `decide` on one rank and return its answer on every rank. Collective; it does not need the process group.

        Args:
            key: Name of the question in the store.
            decide: Returns the answer.
            per_node: Whether `decide` runs on the first rank of each machine, for the ranks of that machine, or only on rank 0.

        Raises:
            ConfigError: `decide` raised it on a rank where it ran.
        """
        if self.world_size == 1:
            return decide()
        self._questions += 1
        key = f"{key}/{self._questions}"  # the same key may be used again
        if not per_node or self.nodes == 1:
            return self._ask(key, decide, self.rank == 0)
        answer, problem = None, None
        try:
            answer = self._ask(f"{key}/{self.node}", decide, self.local_rank == 0)
        except ConfigError as error:
            problem = error
        try:  # without this question the other nodes would wait for the one that failed
            self._ask(f"{key}/nodes", partial(self._check_nodes, key), self.rank == 0)
        except ConfigError as error:
            raise problem or error from None
        return cast("Answer", answer)

    def _ask(self, key: str, decide: Callable[[], Answer], answers: bool) -> Answer:
        """Return the answer of the rank that `answers`, or raise its ConfigError."""
        if answers:
            try:
                answer = {"value": decide()}
            except ConfigError as error:
                self.store.set(key, json.dumps({"error": str(error)}))
                raise
            self.store.set(key, json.dumps(answer))
            return answer["value"]
        self.store.wait([key], DECISION_TIMEOUT)
        found = json.loads(self.store.get(key))
        if "error" in found:
            raise ConfigError(found["error"])
        return found["value"]

    def _check_nodes(self, key: str) -> None:
        """Raise the ConfigError that a node has set as its answer."""
        for node in range(self.nodes):
            self._ask(f"{key}/{node}", lambda: None, answers=False)

    def collect(self, key: str, value: str) -> list[str] | None:
        """Gather one string per rank on rank 0. Collective; it does not need the process group.

        Args:
            key: Name of the values in the store.
            value: The string of this rank.

        Returns:
            On rank 0 the values in order of rank; None on the other ranks, which do not wait.
        """
        if self.world_size == 1:
            return [value]
        self._questions += 1
        keys = [f"{key}/{self._questions}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], value)
        if self.rank != 0:
            return None
        self.store.wait(keys, DECISION_TIMEOUT)
        return [found.decode() for found in self.store.multi_get(keys)]

    def conclude(self, key: str, value: Any, decide: Callable[[list[Any]], Answer]) -> Answer:
        """Return on every rank what rank 0 concludes from the values of all ranks. Collective, as `agree`.

        Args:
            key: Name of the question in the store.
            value: That of this rank, which JSON must support.
            decide: Returns the answer, from the values in order of rank.

        Raises:
            ConfigError: `decide` raised it.
        """
        found = self.collect(key, json.dumps(value)) or []
        return self.agree(key, lambda: decide([json.loads(each) for each in found]))

    @property
    def launch(self) -> str:
        """The identifiers of this launch, one per line: each node's agent has its own. Collective the first time.

        They are complete on rank 0 only.
        """
        if self._launch is None:
            own = launch_id()
            self._launch = "\n".join(dict.fromkeys(self.collect("launch", own) or [own]))
        return self._launch

    def exit_if_abandoned(self, code: int) -> None:
        """Exit at once, without the interpreter's finalization, if an abandoned thread still waits for the store.

        If the store answers a thread during the finalization, C++ code of torch aborts the process. torchrun would take this
        rank, which has finished, for a failed one, and start the ranks of its node again, for which no other node waits.
        """
        if any(thread.is_alive() for thread in self.abandoned):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
