"""Ranks on the CPU for a proof, kept alive from one comparison to the next.

A new process would spend seconds on imports for each of twenty comparisons. The ranks are forked
from this process, which has imported them already, and so they also have what a proof is about
without a copy: a dataset, or a model of a script.

    this process ---- keeper of stores      a key-value store for each comparison
                 +--- rank 0                runs functions, one after the other
                 +--- rank 1
                 ...

The store has a process of its own, because this one must have no threads: a rank that is forked
while a thread holds a lock would wait for it for ever.
"""

import faulthandler
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ddp_lab.config.causes import is_secondary
from ddp_lab.config.errors import ConfigError, SampleError, TrainingError, describe_error

LIMIT = 600.0  # seconds that a comparison may take; a hang ends after a minute (subject.py)
GRACE = 3.0  # seconds for the other ranks after the first one has failed
SLOW = 5.0  # seconds after which a wait is announced
AGAIN = 20.0  # seconds from there to the next announcement
ADDRESS = "127.0.0.1"
# of a launch around this process, which is none of the ranks' here
OTHER_LAUNCH = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "GROUP_RANK", "GROUP_WORLD_SIZE")


class Answer(NamedTuple):
    """How a function has ended on a rank, or on all of them.

    Attributes:
        kind: returned; refused, by a ConfigError; or failed.
        value: what it returned; else the message.
        is_secondary: whether the failure most likely follows from the end of another rank.
    """

    kind: Literal["returned", "refused", "failed"]
    value: Any
    is_secondary: bool = False


class Workers:
    """Processes that run functions as the ranks of a process group; a context manager.

    Args:
        context: the first argument of every function, which the processes inherit.
        number: of processes.
        limit: seconds that a function may take.
        announce: gets a line about what takes long.
    """

    def __init__(
        self,
        context: Any,
        number: int,
        limit: float = LIMIT,
        announce: Callable[[str], object] | None = None,
    ):
        self.context = context
        self.number = number
        self.limit = limit
        self.announce = announce or print_to_stderr
        self._together = number  # ranks of the last comparison
        self._processes: list[BaseProcess] = []
        self._pipes: list[Any] = []  # Connections, to the keeper of stores, then to each rank

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def run(
        self, ranks: int, function: Callable[..., Any], *arguments: Any, activity: str
    ) -> Answer:
        """Run `function(context, *arguments)` on some ranks, and return what rank 0 returned.

        Args:
            ranks: how many, at most `number`.
            function: of a module, so that its name is enough for the processes.
            arguments: of it, which pickle supports.
            activity: what it does, for the announcement of a wait.

        Returns:
            The answer of rank 0, if all ranks have returned; else the first that explains why not.
                After a failure the processes are started anew.
        """
        if ranks > self._together:
            # Some names that ranks agree on are numbers of what each has made so far, so that those
            # of a comparison must have made the same.
            self.end()
        self._together = ranks
        if not self._processes:
            self._start()
        keeper, *pipes = self._pipes
        keeper.send(None)
        environment = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": ADDRESS,
            "MASTER_PORT": str(keeper.recv()),
            # the keeper's store takes the place of the one in torchrun's agent
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        work = pickle.dumps((function, arguments, environment))
        for pipe in pipes[:ranks]:
            pipe.send_bytes(work)
        answers = self._receive(pipes[:ranks], activity)
        failures = [answer for answer in answers.values() if answer.kind != "returned"]
        if not failures and len(answers) == ranks:
            return answers[0]
        if len(answers) < ranks or any(answer.kind == "failed" for answer in failures):
            self.end()
        if not failures:
            silent = [str(rank) for rank in range(ranks) if rank not in answers]
            return Answer("failed", f"rank {', '.join(silent)} did not end within {self.limit:g} s")
        # in the order of their arrival; a refusal explains a failure that follows from it
        return min(failures, key=lambda answer: (answer.kind != "refused", answer.is_secondary))

    def _receive(self, pipes: Sequence[Connection], activity: str) -> dict[int, Answer]:
        """Return the answers by rank, in the order of their arrival; without those of silent ranks.

        Raises:
            KeyboardInterrupt: the user does not want to wait.
        """
        begin = time.monotonic()
        end = begin + self.limit
        announced = begin + SLOW
        answers = dict[int, Answer]()
        while len(answers) < len(pipes) and time.monotonic() < end:
            silent = [rank for rank in range(len(pipes)) if rank not in answers]
            pause = max(0.0, min(end, announced) - time.monotonic())
            ready = wait([pipes[rank] for rank in silent], pause)
            for rank in [rank for rank in silent if pipes[rank] in ready]:
                answers[rank] = self._answer(rank, pipes[rank])
                if answers[rank].kind != "returned":
                    end = min(end, time.monotonic() + GRACE)
            if time.monotonic() >= announced:
                self.announce(f"{activity}: waiting, {time.monotonic() - begin:.0f} s so far")
                announced += AGAIN
        return answers

    def _answer(self, rank: int, pipe: Connection) -> Answer:
        """Return the answer that has arrived, or how the process has ended without one."""
        try:
            return pickle.loads(pipe.recv_bytes())  # of a process that was forked from this one
        except (EOFError, OSError):
            process = self._processes[rank + 1]
            process.join(GRACE)
            code = process.exitcode or 0
            how = (
                f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            )
            cause = ""
            if code == -signal.SIGABRT:
                cause = ": gloo does this when ranks exchange tensors of different sizes"
            return Answer("failed", f"rank {rank} {how}{cause}")

    def _start(self) -> None:
        """Fork the processes."""
        sys.stdout.flush()
        sys.stderr.flush()
        fork = multiprocessing.get_context("fork")
        pairs = [fork.Pipe() for _ in range(self.number + 1)]
        self._pipes = [ours for ours, _ in pairs]
        for place, (_, theirs) in enumerate(pairs):
            others = [end for pair in pairs for end in pair if end is not theirs]
            if place == 0:
                process = fork.Process(target=keep_stores, args=(theirs, others), daemon=True)
            else:
                arguments = (self.context, place - 1, theirs, others)
                # without `daemon`, so that a dataset may have processes of its own
                process = fork.Process(target=serve, args=arguments)
            process.start()
            self._processes.append(process)
        for _, theirs in pairs:
            theirs.close()

    def end(self) -> None:
        """End the processes. The next call of `run` starts others."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes = []
        self._pipes = []


def print_to_stderr(line: str) -> None:
    """Print a line that is no part of the result."""
    print(line, file=sys.stderr, flush=True)


def begin_process(others: Sequence[Connection]) -> None:
    """Prepare a forked process: Ctrl-C and the output are its parent's."""
    for end in others:  # inherited: they would hide that another process has ended
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # gloo aborts on tensors of different sizes
    faulthandler.disable()  # of which the parent reports the end
    os.dup2(2, 1)  # what a model prints is no part of the result


def keep_stores(pipe: Connection, others: Sequence[Connection]) -> None:
    """Open a new key-value store for each request, and answer by its port."""
    begin_process(others)
    with suppress(EOFError, OSError):
        while True:
            pipe.recv()
            store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
            pipe.send(store.port)
    os._exit(0)


def serve(context: Any, rank: int, pipe: Connection, others: Sequence[Connection]) -> None:
    """Run functions as a rank, until the parent has ended."""
    begin_process(others)
    torch.set_num_threads(1)
    for name in OTHER_LAUNCH:
        os.environ.pop(name, None)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    with suppress(EOFError, OSError):
        while True:
            function, arguments, environment = pickle.loads(pipe.recv_bytes())
            os.environ |= environment
            answer = answer_of(function, context, *arguments)
            # plain pickle sends tensors by value, and not through shared memory
            pipe.send_bytes(pickle.dumps(answer))
    os._exit(0)


def answer_of(function: Callable[..., Any], *arguments: Any) -> Answer:
    """Run a function, and return how it has ended."""
    try:
        return Answer("returned", function(*arguments))
    except (ConfigError, SampleError) as error:
        return Answer("refused", str(error))
    except TrainingError as error:
        return Answer("failed", str(error))
    except Exception as error:
        return Answer("failed", describe_error(error), is_secondary(error))
