"""A child process of a rank, in which what may hang is called with a time limit."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ddp_lab.config.errors import describe_error
from ddp_lab.world.process import die_with_parent

LIMIT = 10.0  # seconds for a call
START_LIMIT = 30.0  # seconds for a new process, which imports torch and opens a device
END_LIMIT = 5.0  # seconds until a killed process is gone


class Answer(NamedTuple):
    """What a call in the child has come to.

    Attributes:
        value: what the function has returned; None if it has not.
        problem: why it has not returned; "" if it has.
        hung: whether it took too long.
    """

    value: Any = None
    problem: str = ""
    hung: bool = False


class Child:
    """A spawned process that calls functions for this one, one at a time.

    It is killed when a call takes too long or raises an exception, because nobody knows in what
    state NCCL is then. The next call gets a new process, which starts at once.

    Args:
        prepare: the first function that each process calls; it gets a dictionary that the process
            keeps for all its calls.
        arguments: further arguments of it. All of them are pickled.
    """

    def __init__(self, prepare: Callable[..., None], *arguments: Any):
        self._prepare = prepare
        self._arguments = arguments
        self._start({})

    def _start(self, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, dict(environment)), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the child is the end of the pipe
        self._send(self._prepare, self._arguments)
        self._deadline = time.monotonic() + START_LIMIT
        self._is_ready = False

    def restart(self, environment: Mapping[str, str]) -> None:
        """Replace the process by one with further environment variables."""
        self.end()
        self._start(environment)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join(END_LIMIT)
        self._connection.close()

    def call(self, function: Callable[..., Any], *arguments: Any, limit: float = LIMIT) -> Answer:
        """Call a function in the process.

        Args:
            function: gets the dictionary of the process, and the arguments.
            arguments: further arguments of it. All of them are pickled.
            limit: seconds that it may take, besides the start of the process.
        """
        answer = self._wait_until_ready()
        if not answer.problem:
            self._send(function, arguments)
            answer = self._receive(limit)
        if answer.problem:
            self.restart({})
        return answer

    def _wait_until_ready(self) -> Answer:
        if self._is_ready:
            return Answer()
        answer = self._receive(max(0.0, self._deadline - time.monotonic()))
        self._is_ready = not answer.problem
        return answer

    def _send(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        with suppress(BrokenPipeError):  # it has ended, which `_receive` reports
            self._connection.send((function, arguments))

    def _receive(self, limit: float) -> Answer:
        try:
            if not self._connection.poll(limit):
                return Answer(problem=f"no answer within {limit:g} s", hung=True)
            value, problem = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(END_LIMIT)
            return Answer(problem=f"the process ended with exit code {self._process.exitcode}")
        return Answer(value, problem)


def serve(connection: Connection, environment: Mapping[str, str]) -> None:
    """Call functions in this process until the parent closes the connection.

    Args:
        connection: on which functions with their arguments come, and values and problems go.
        environment: further environment variables.
    """
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the parent ends this process
    os.environ.update(environment)
    # the problem goes to the parent; what torch logs besides would be printed by each rank
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    kept: dict[str, Any] = {}
    while True:
        try:
            function, arguments = connection.recv()
            message = (function(kept, *arguments), "")
        except EOFError:  # the parent has closed the connection
            return
        except Exception as error:
            message = (None, describe_error(error))
        connection.send(message)
