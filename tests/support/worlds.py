"""Worlds of real ranks for the tests: processes on this machine that connect through a store, like torchrun's."""

import contextlib
import functools
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import warm
from launches import ROOT, SUPPORT

# Ranks are forked from a server that has imported everything, so a world starts without seconds of imports: the server of warm
# launches, or, where that does not run or may not see the GPUs, a forkserver.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["preload"])
# The forkserver finds `preload` only through PYTHONPATH: before Python 3.13 it does not inherit sys.path.
SEARCH = [str(ROOT), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(SEARCH)


def once(function: Callable) -> Callable:
    """Cache results like functools.cache, and AssertionErrors too, so that a failing world runs only once."""

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


def run_rank(function: Callable, args: tuple, environment: dict[str, str], connection: Connection) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    # As in torchrun's ranks: with the inherited forkserver method, each DataLoader worker would import torch.
    multiprocessing.set_start_method("fork", force=True)
    try:
        result = function(*args)
        assert not dist.is_initialized(), "the process group leaked: it is still open after the run"
        connection.send_bytes(pickle.dumps((True, result)))  # plain pickle sends tensors by value, not through shared memory
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
        sys.exit(1)


def _start_rank(*work: Any) -> tuple[Callable[[], None], Connection]:
    """Start `run_rank(*work)` in a new process; return a function that ends it, after up to 5 s, and the connection to it."""
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        if warm.ADDRESS not in os.environ or torch.cuda.is_available():
            forked = CONTEXT.Process(target=run_rank, args=(*work, theirs))
            forked.start()
            return functools.partial(_end, forked.join, forked.kill), ours
        process = warm.Warm([sys.executable, str(SUPPORT / "rank.py")], stdin=theirs.fileno())
    ours.send(sys.path)
    ours.send(work)
    return functools.partial(_end, process.wait, process.kill), ours


def _end(wait: Callable[[float], Any], kill: Callable[[], None]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        wait(5)
    kill()  # which does nothing to a process that has ended
    wait(60)


def run_world(world_size: int, function: Callable, *args: Any, timeout: float = 300) -> list[Any]:
    """Run `function(*args)` on every rank and return the results in order of rank.

    Args:
        timeout: Seconds that the whole world may take.

    Raises:
        AssertionError: A rank raised (with its traceback), died, left its process group open, or exceeded `timeout`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(world_size):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store above takes the place of the one in torchrun's agent
        }
        ranks.append(_start_rank(function, args, environment))
    deadline = time.monotonic() + timeout
    results, problems = [], []
    for rank, (_, connection) in enumerate(ranks):
        try:
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                problems.append(f"rank {rank} did not end within {timeout} s")
                continue
            good, value = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            good, value = False, "died"
        if good:
            results.append(value)
        else:
            problems.append(f"rank {rank}: {value}")
            deadline = min(deadline, time.monotonic() + 5)  # the other ranks may hang, waiting for this one
    for end, _ in ranks:
        end()
    assert not problems, "\n".join(problems)
    return results
