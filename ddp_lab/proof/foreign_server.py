"""The process from which the ranks of all worlds are forked, so that torch is imported once.

It is spawned: a fresh interpreter, which has no threads and no GPU, and in which nothing was
computed. Ranks that are forked from it are as fresh. If importing the user's files has started
threads, which a fork would lack, ranks are spawned in its place.
"""

import importlib
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.proof.evidence import Tensors
from ddp_lab.proof.foreign_rank import Answer
from ddp_lab.proof.foreign_world import ENDING, GRACE, STARTING, World, describe

NAME = "ddp_lab verify"  # of the process
UNGUARDED = 75  # exit code of the process if the user's script calls verify when it is imported
GUARD = (
    "verify: the script calls verify when it is imported, which its processes do, too. Put the "
    'call below `if __name__ == "__main__":`'
)
FILE = (
    "Define the step with `def` at the top level of a file, and what it needs in it or in the batch"
)


class StepError(Exception):
    """A step that has not returned on all ranks; the message explains it."""


@dataclass(frozen=True)
class Request:
    """A world to start.

    Attributes:
        world_size: number of ranks.
        batches: pickled, a list.
        number: of the batches.
        timeout: seconds.
    """

    world_size: int
    batches: bytes
    number: int
    timeout: float


def refuse_nested() -> None:
    """End a process of verify that, while it imports the user's script, comes to verify again."""
    process = multiprocessing.current_process()
    if process.name.startswith(NAME) and getattr(process, "_inheriting", False):
        sys.stdout.flush()
        os._exit(UNGUARDED)


def pickled_step(step: Any) -> bytes:
    """Return a step as bytes.

    Raises:
        ConfigError: another process cannot load it.
    """
    if not callable(step):
        raise ConfigError(
            f"verify: step={step!r}: must be a function of rank, world_size and batch"
        )
    function = getattr(step, "func", step)  # of a functools.partial
    name = getattr(function, "__qualname__", type(function).__qualname__)
    main = getattr(sys.modules["__main__"], "__file__", None)
    if getattr(function, "__module__", None) == "__main__" and not (main and Path(main).exists()):
        raise ConfigError(
            f"verify: step={name} is defined in a notebook or in the standard input, which fresh "
            "processes cannot import. Write it to a file and import it from there"
        )
    try:
        return pickle.dumps(step)
    except Exception as error:  # pickle raises several kinds
        if "<lambda>" in name or "<locals>" in name:
            why = "is a lambda or a function within a function, which fresh processes cannot load"
        else:
            why = f"cannot be passed to fresh processes ({error})"
        raise ConfigError(f"verify: step={name} {why}. {FILE}") from None


def pickled_batches(batches: Sequence[Any]) -> bytes:
    """Return batches as bytes.

    Raises:
        ConfigError: they cannot be passed to another process.
    """
    try:
        return pickle.dumps(list(batches))
    except Exception as error:  # pickle raises several kinds
        raise ConfigError(
            f"verify: batch: a {type(batches[0]).__name__} cannot be passed to fresh processes "
            f"({error}). Pass tensors, or make the batch in step and leave batch out"
        ) from None


@contextmanager
def environment() -> Generator[None]:
    """Let processes that are started in the body see no GPU, and use one thread."""
    changes = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def serve(payload: bytes, pipe: Connection) -> None:
    """Start the worlds that are asked for, until the parent closes the pipe.

    For each request a list of the answers of all ranks is sent, one for each batch; the last may
    be a failure.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then ends all
    torch.set_num_threads(1)
    # DDP and optimizers import it when they are first used: seconds, on each of the ranks
    importlib.import_module("torch._dynamo")
    try:
        pickle.loads(payload)  # imports the user's files
    except BaseException as error:
        pipe.send_bytes(pickle.dumps(Answer("import", describe_error(error))))
        return
    pipe.send_bytes(pickle.dumps(Answer("passed")))
    method = "fork" if count_threads() == 1 else "spawn"
    with suppress(EOFError, OSError):
        while True:
            asked: Request = pipe.recv()
            pipe.send_bytes(pickle.dumps(answers_of(asked, payload, method)))


def answers_of(asked: Request, payload: bytes, method: str) -> list[list[Answer]]:
    """Return the answers of all ranks, for each batch until a failure of the process or the time.

    An exception of the step is no such failure.
    """
    answers = list[list[Answer]]()
    with World(asked.world_size, payload, asked.batches, asked.timeout, method) as world:
        while len(answers) < asked.number:
            answers.append(world.answers())
            if any(answer.kind == "waits" or answer.is_last for answer in answers[-1]):
                break
    return answers


def count_threads() -> int:
    """Return the number of threads of this process, those of libraries included, on Linux."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 2


class Server:
    """The process, as its parent uses it. A context manager, which ends it.

    Args:
        step: the user's.

    Raises:
        ConfigError: fresh processes cannot load the step.
    """

    def __init__(self, step: Any):
        refuse_nested()
        payload = pickled_step(step)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.pipe: Any = ours
        self.process = context.Process(target=serve, args=(payload, theirs), name=NAME)
        with theirs, environment():
            self.process.start()
        try:
            answer: Answer = self.receive(2 * STARTING)
            if answer.kind != "passed":
                raise ConfigError(
                    f"verify: fresh processes cannot load the step: {answer.text}. {FILE}"
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, and with it the ranks that still run."""
        self.pipe.close()
        self.process.join(ENDING)
        self.process.kill()
        self.process.join(ENDING)

    def receive(self, seconds: float) -> Any:
        """Return what the process sends.

        Raises:
            ConfigError: it has ended, or sent nothing.
        """
        if not self.pipe.poll(seconds):
            raise ConfigError(f"verify: its process did not answer within {seconds:g} s")
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(ENDING)
            if self.process.exitcode == UNGUARDED:
                raise ConfigError(GUARD) from None
            raise ConfigError(
                f"verify: its process ended with exit code {self.process.exitcode}; its error is "
                f"above. {FILE}"
            ) from None

    def answers(
        self, world_size: int, batches: Sequence[Any], timeout: float
    ) -> list[list[Answer]]:
        """Return the answers of the ranks for each batch; see `answers_of`.

        Raises:
            ConfigError: the batches cannot be passed to another process.
        """
        request = Request(world_size, pickled_batches(batches), len(batches), timeout)
        self.pipe.send(request)
        return self.receive(timeout + 2 * STARTING + GRACE)

    def results(self, world_size: int, batch: Any, timeout: float) -> list[Tensors]:
        """Return what each rank computes for the batch.

        Raises:
            StepError: a rank has no result; the message names the first cause.
            ConfigError: the batch cannot be passed to another process.
        """
        (answers,) = self.answers(world_size, [batch], timeout)
        tensors = [answer.tensors for answer in answers if answer.tensors is not None]
        if len(tensors) < world_size:
            raise StepError(describe(answers, timeout))
        return tensors
