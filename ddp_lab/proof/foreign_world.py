"""The ranks of a step, as processes, and what they report. Nothing hangs, and none is left."""

import multiprocessing
import pickle
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ddp_lab.proof.foreign_rank import HOST, Answer, Place, run_rank

GRACE = 3.0  # seconds for the other ranks' errors after the first
ENDING = 5.0  # seconds in which a killed process must be gone
STARTING = 60.0  # seconds for a process that imports torch


class World:
    """The processes of some ranks, each of which calls the step for the batches.

    Args:
        world_size: number of ranks.
        payload: the pickled step.
        batches: pickled.
        timeout: seconds for all calls.
        method: fork, or spawn if this process has threads, which a fork would lack.
    """

    def __init__(
        self, world_size: int, payload: bytes, batches: bytes, timeout: float, method: str = "fork"
    ):
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
        context: Any = multiprocessing.get_context(method)
        self.timeout = timeout
        self.end = time.monotonic() + timeout + (STARTING if method == "spawn" else 0.0)
        self.processes = list[BaseProcess]()
        self.pipes = list[Any]()
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                self.pipes.append(ours)
                place = Place(rank, world_size, port, timeout)
                process = context.Process(
                    target=run_rank, args=(place, payload, batches, theirs), daemon=True
                )
                with theirs:
                    process.start()
                self.processes.append(process)
            # Not before: a rank that is forked while the store's thread holds a lock would wait
            # for it forever.
            self.store = TCPStore(
                HOST,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes and wait for them."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(ENDING)
        for pipe in self.pipes:
            pipe.close()

    def answers(self) -> list[Answer]:
        """Return the next answer of every rank, or why there is none."""
        answers = dict[int, Answer]()
        silent = set(range(len(self.pipes)))
        end = self.end
        is_asked = False
        while silent:
            ready = wait([self.pipes[rank] for rank in silent], max(0.0, end - time.monotonic()))
            for rank in [rank for rank in silent if self.pipes[rank] in ready]:
                silent.remove(rank)
                try:
                    answers[rank] = pickle.loads(self.pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    answers[rank] = self.exited(rank)
                if answers[rank].kind != "passed":
                    end = min(end, time.monotonic() + GRACE)
            if not ready and is_asked:
                return [
                    answers.get(rank, Answer("waits", "does not respond"))
                    for rank in range(len(self.pipes))
                ]
            if not ready:
                is_asked = True
                end = time.monotonic() + 1
                for rank in silent:
                    with suppress(OSError):
                        self.pipes[rank].send("where")
        return [answers[rank] for rank in range(len(self.pipes))]

    def exited(self, rank: int) -> Answer:
        """Return how the process of a rank has ended."""
        process = self.processes[rank]
        process.join(ENDING)
        code = process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return Answer("raised", f"its process ended {how}, without a result", is_last=True)


def describe(answers: Sequence[Answer], timeout: float) -> str:
    """Return why some ranks have not returned a result: the first cause alone."""
    numbered = list(enumerate(answers))
    raised = [pair for pair in numbered if pair[1].kind == "raised"]
    raised.sort(key=lambda pair: pair[1].is_secondary)
    if raised:
        rank, answer = raised[0]
        return f"rank {rank}: {answer.text}" if len(answers) > 1 else answer.text
    waiting = [f"rank {rank} {answer.text}" for rank, answer in numbered if answer.kind == "waits"]
    returned = [f"rank {rank} has returned" for rank, one in numbered if one.kind == "passed"]
    return (
        f"not done within {timeout:g} s: {'; '.join([*waiting, *returned])}. If the step is slow, "
        "pass timeout="
    )
