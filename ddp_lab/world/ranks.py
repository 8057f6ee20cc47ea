"""This rank among the others of its launch, and what they agree on through the key-value store."""

import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

# Documented as torch.distributed.Store etc., but the module does not export them explicitly.
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from ddp_lab.config.errors import ConfigError
from ddp_lab.world.process import RankInfo, env_int, launch_id, run_id

# the longest wait is for a slow dataset download on another rank
DECISION_TIMEOUT = timedelta(minutes=30)
# the shortest timeout for other ranks to start, which import from a slow disk
START_TIMEOUT = timedelta(minutes=5)

Answer = TypeVar("Answer", bound=str | list[Any] | float | None)
Result = TypeVar("Result")


class Ranks:
    """The ranks of a launch, seen from this one. Nothing here needs a device or the process group.

    Attributes:
        rank, world_size: Index of this process and number of processes; 0 and 1 without torchrun.
        local_rank, local_world_size: The same, counting only the processes of this machine.
        node, nodes: Index of this machine and number of machines.
        abandoned: Threads that nothing needs any more, but that may still wait for the store.

    Args:
        rank_info: Which rank this is.
        timeout: How long to wait for the store to open.
    """

    def __init__(self, rank_info: RankInfo, timeout: timedelta):
        self.rank = rank_info.rank
        self.world_size = rank_info.world_size
        self.local_rank = rank_info.local_rank
        self.local_world_size = rank_info.local_world_size
        self.node = rank_info.node
        self.nodes = rank_info.nodes
        self.timeout = timeout
        self._place_is_known = rank_info.has_known_place
        self.abandoned: list[threading.Thread] = []
        self._store: Store | None = None
        self._questions = 0
        self._collections = 0
        self._launch: str | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints, and writes what all ranks share."""
        return self.rank == 0

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
        """Return whether torchrun's agent opens the store before any rank starts, not rank 0."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @property
    def store(self) -> Store:
        """The key-value store of the ranks; it can be used before the process group is open.

        Collective the first time.
        """
        if self._store is None:
            if self.world_size == 1 and "MASTER_ADDR" not in os.environ:
                self._store = HashStore()
            else:
                store, _, _ = next(
                    rendezvous("env://", self.rank, self.world_size, timeout=self.timeout)
                )
                self._store = PrefixStore(f"attempt_{self._attempt(store)}", store)
                if not self._place_is_known:
                    self._require_one_first_rank(self._store)
        return self._store

    def _require_one_first_rank(self, store: Store) -> None:
        """Check that no other rank of this machine takes itself for the first one, too.

        Raises:
            ConfigError: One does.
        """
        if store.add(f"first/{self.node}", 1) > 1:
            raise ConfigError(
                "--virtual-local-rank: gives all ranks of a machine LOCAL_RANK=0, from which their "
                f"places on machine {self.node} of {self.nodes} do not follow, because the "
                "machines have different numbers of ranks. Start the same number on each, or "
                "leave the option out"
            )

    def connect(self, prefix: str) -> Store:
        """Return another connection to the store's keys with a prefix, for another thread.

        Threads cannot share a connection: a thread that waits for a key would block the others.
        """
        return PrefixStore(prefix, self.store.clone())

    def _attempt(self, store: Store) -> str:
        """Return a name of this start.

        The agent's store outlives a restart, with the dead ranks' addresses in it.
        """
        if self.agent_keeps_store:
            from ddp_lab.world.store import agree_on_attempt

            return agree_on_attempt(
                store, self.rank, self.world_size, max(self.timeout, START_TIMEOUT)
            )
        # The store is rank 0's, and new at each start. That of another launch may have its port.
        return run_id() or "0"

    def broadcast_from_rank0(
        self, key: str, decide: Callable[[], Answer], per_node: bool = False
    ) -> Answer:
        """Run `decide` on one rank and return its answer on every rank.

        Collective; it does not need the process group.

        Args:
            key: Name of the question, which all ranks must ask in the same order.
            decide: Returns the answer.
            per_node: Whether `decide` runs on the first rank of each machine, for the ranks of that
                machine, or only on rank 0.

        Raises:
            ConfigError: `decide` raised it on a rank where it ran.
            OtherRankError: `decide` raised another exception on another rank.
        """
        if self.world_size == 1:
            return decide()
        self._questions += 1
        answer_key = answer_of(self._questions)
        if not per_node or self.nodes == 1:
            return self._ask(answer_key, key, decide, self.is_main)

        answer = None
        problem = None
        try:
            answer = self._ask(f"{answer_key}/{self.node}", key, decide, self.local_rank == 0)
        except Exception as error:
            problem = error

        try:  # without this question the other nodes would wait for the one that failed
            self._ask(answer_key, key, partial(self._check_nodes, answer_key, key), self.is_main)
        except Exception as error:
            raise problem or error from None
        return cast("Answer", answer)

    def _ask(
        self, answer_key: str, name: str, decide: Callable[[], Answer], answers: bool
    ) -> Answer:
        """Return the answer of the rank that `answers`, or raise what stands for its exception.

        Raises:
            RuntimeError: That rank has answered another question: the ranks run different code.
        """
        if answers:
            try:
                value = decide()
                answer = json.dumps({"question": name, "value": value})
            except BaseException as error:
                self._pass_on([answer_key], error)
                raise
            self.store.set(answer_key, answer)
            return value

        self.store.wait([answer_key], DECISION_TIMEOUT)
        reply = json.loads(self.store.get(answer_key))
        if "error" in reply:
            from ddp_lab.config.causes import from_record

            raise from_record(reply)

        if reply["question"] != name:
            other = reply["question"]
            raise RuntimeError(f"rank {self.rank} asks {name}, but the others agree about {other}")
        return reply["value"]

    def _pass_on(self, keys: list[str], error: BaseException) -> None:
        """Set some keys of the store to this rank's exception, unless the store is gone."""
        from ddp_lab.config.causes import to_record

        record = json.dumps(to_record(error, self.rank))
        with suppress(Exception):
            for key in keys:
                self.store.set(key, record)

    def answer_with(self, error: BaseException) -> None:
        """Answer the next question, for which other ranks may wait, by an exception of rank 0."""
        answer_key = answer_of(self._questions + 1)
        of_nodes = [f"{answer_key}/{node}" for node in range(self.nodes)]
        if self.is_main and self.world_size > 1 and self._store is not None:
            self._pass_on([answer_key, *of_nodes], error)

    def succeed(self, key: str, work: Callable[[], Result]) -> Result:
        """Run `work` on every rank, and return its result once all ranks have succeeded.

        Collective.

        So nothing is written, and no process group opens, if only one rank fails. A rank that fails
        does not wait.

        Args:
            key: Name of the work.
            work: Is run once on each rank, and may be collective itself.

        Raises:
            Exception: `work` raised it on this rank.
            ConfigError: `work` raised it on another rank.
            OtherRankError: `work` raised another exception on another rank.
        """
        if self.world_size == 1:
            return work()
        outcomes = self._keys_of_ranks(key)
        try:
            result = work()
        except BaseException as error:
            if self._store is not None:  # to open it is collective
                self._pass_on([outcomes[self.rank]], error)
            raise
        self.store.set(outcomes[self.rank], json.dumps({}))
        self.broadcast_from_rank0(key, partial(self._check_ranks, outcomes))
        return result

    def _check_ranks(self, outcomes: list[str]) -> None:
        """Raise what stands for the exception of the first rank that has failed.

        Args:
            outcomes: the keys of the ranks' outcomes.
        """
        self.store.wait(outcomes, DECISION_TIMEOUT)
        for outcome in map(json.loads, self.store.multi_get(outcomes)):
            if "error" in outcome:
                from ddp_lab.config.causes import from_record

                raise from_record(outcome)

    def _check_nodes(self, answer_key: str, name: str) -> None:
        """Raise what stands for the exception that a node has set as its answer."""
        for node in range(self.nodes):
            self._ask(f"{answer_key}/{node}", name, lambda: None, answers=False)

    def _keys_of_ranks(self, key: str) -> list[str]:
        """Return a key of the store for each rank, which no earlier collection had."""
        self._collections += 1
        return [f"{key}/{self._collections}/{rank}" for rank in range(self.world_size)]

    def gather_objects(self, key: str, value: str) -> list[str] | None:
        """Gather one string per rank on rank 0. Collective; it does not need the process group.

        Args:
            key: Name of the values in the store.
            value: The string of this rank.

        Returns:
            On rank 0 the values in order of rank; None on the other ranks, which do not wait.
        """
        if self.world_size == 1:
            return [value]
        keys = self._keys_of_ranks(key)
        self.store.set(keys[self.rank], value)
        if self.rank != 0:
            return None
        self.store.wait(keys, DECISION_TIMEOUT)
        return [text.decode() for text in self.store.multi_get(keys)]

    def gather_and_decide(
        self, key: str, value: Any, decide: Callable[[list[Any]], Answer]
    ) -> Answer:
        """Return on every rank what rank 0 concludes from the values of all ranks.

        Collective, as `broadcast_from_rank0`.

        Args:
            key: Name of the question in the store.
            value: That of this rank, which JSON must support.
            decide: Returns the answer, from the values in order of rank.

        Raises:
            ConfigError: `decide` raised it.
            OtherRankError: `decide` raised another exception on rank 0.
        """
        texts = self.gather_objects(key, json.dumps(value)) or []
        return self.broadcast_from_rank0(key, lambda: decide([json.loads(each) for each in texts]))

    @property
    def launch(self) -> str:
        """The identifiers of this launch, one per line: each node's agent has its own.

        Collective the first time.

        They are complete on rank 0 only.
        """
        if self._launch is None:
            own_id = launch_id()
            self._launch = "\n".join(
                dict.fromkeys(self.gather_objects("launch", own_id) or [own_id])
            )
        return self._launch

    def exit_if_abandoned(self, code: int) -> None:
        """Exit at once without finalization if an abandoned thread still waits for the store.

        If the store answers a thread during the finalization, C++ code of torch aborts the process.
        torchrun would take this rank, which has finished, for a failed one, and start the ranks of
        its node again, for which no other node waits.
        """
        if any(thread.is_alive() for thread in self.abandoned):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def answer_of(question: int) -> str:
    """Return the key of the store for the answer to a question.

    It does not contain the question's name, so that a rank that fails before it can answer it.
    """
    return f"answer/{question}"
