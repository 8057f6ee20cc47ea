"""Worlds of real ranks for the tests: processes that connect through a store, like torchrun's.

A world is a process, forked from the server of warm.py if that runs, from which its ranks are
forked.
"""

import functools
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from launches import SUPPORT
from warm import programs

CONTEXT = multiprocessing.get_context("fork")


def once(function: Callable) -> Callable:
    """Cache results like functools.cache, and AssertionErrors: a failing world runs only once."""

    @functools.cache
    def outcome(*args):
        try:
            return function(*args), None
        except AssertionError as error:
            return None, error

    def call(*args):
        result, error = outcome(*args)
        if error is not None:
            raise error
        return result

    return call


def run_rank(
    function: Callable, args: tuple, environment: dict[str, str], connection: Connection
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    # As in torchrun's ranks: with the inherited forkserver method, each DataLoader worker would
    # import torch.
    multiprocessing.set_start_method("fork", force=True)
    try:
        result = function(*args)
        assert not dist.is_initialized(), "the process group leaked: it is still open after the run"
        # plain pickle sends tensors by value, not through shared memory
        connection.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
        sys.exit(1)


def fork_ranks(
    world_size: int, function: Callable, args: tuple, timeout: float
) -> tuple[list[Any], list[str]]:
    """Run `function(*args)` on every rank.

    Return the results, in order of rank, and what went wrong.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ranks = []
    for rank in range(world_size):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # the store below takes the place of the one in torchrun's agent
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        ours, theirs = CONTEXT.Pipe()
        with theirs:
            process = CONTEXT.Process(target=run_rank, args=(function, args, environment, theirs))
            process.start()
        ranks.append((process, ours))
    # Not before: a rank that is forked while the store's thread holds a lock of C++ would wait for
    # it forever.
    _store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    deadline = time.monotonic() + timeout
    results = []
    problems = []
    for rank, (_, connection) in enumerate(ranks):
        try:
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                problems.append(f"rank {rank} did not end within {timeout} s")
                continue
            good, value = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            good = False
            value = "died"
        if good:
            results.append(value)
        else:
            problems.append(f"rank {rank}: {value}")
            # the other ranks may hang, waiting for this one
            deadline = min(deadline, time.monotonic() + 5)
    for process, _ in ranks:
        process.join(5)
        process.kill()  # which does nothing to a process that has ended
        process.join(60)
    return results, problems


def run_world(world_size: int, function: Callable, *args: Any, timeout: float = 300) -> list[Any]:
    """Run `function(*args)` on every rank and return the results in order of rank.

    Args:
        timeout: Seconds that the whole world may take.

    Raises:
        AssertionError: A rank raised (with its traceback), died, left its process group open, or
            exceeded `timeout`.
    """
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        world = subprocess.Popen(
            [programs() / "python", SUPPORT / "world.py"],
            stdin=theirs.fileno(),
            start_new_session=True,
        )
    with world, ours:
        ours.send(sys.path)
        ours.send((world_size, function, args, timeout))
        results, problems = pickle.loads(ours.recv_bytes())
    assert not problems, "\n".join(problems)
    return results
