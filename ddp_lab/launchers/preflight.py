"""Checks of the machines before a run.

Do the ranks reach each other and share the run directory, and is there enough shared memory?

train.py runs them before it opens the process group. Mistakes in the config are reported by the
code that reads it: the strategies, TrainSizes, the datasets, RunDir.
"""

import math
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.data.loader import Loader
from ddp_lab.data.worker_count import SHARED_MEMORY, free_shared_memory
from ddp_lab.world.runtime import Runtime
from ddp_lab.world.store import NEW_TORCHRUN

CONNECT_TIMEOUT = 10.0  # seconds within which the ranks' store must accept a connection
# seconds within which every node must see a new file; network file systems cache the absence of a
# file
TOKEN_WAIT = 3.0


class Finding(NamedTuple):
    """The result of a check that does not end the launch, which `ddp-lab doctor` prints.

    Attributes:
        level: How serious it is.
        about: Name of the check.
        text: What was found and, for a warning, the remedy.
    """

    level: Literal["ok", "warning"]
    about: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:8} {self.about}: {self.text}"


def check_network(runtime: Runtime) -> list[Finding]:
    """Check that the store, to which torchrun has given an address, accepts connections.

    Call it before the first `broadcast_from_rank0`.

    Where rank 0 opens the store, only the name is checked.

    Raises:
        NodeError: MASTER_ADDR does not resolve, or nothing accepts connections there, for which
            torch would wait for minutes.
    """
    if runtime.world_size == 1:
        return []
    here = socket.gethostname()
    (host, port) = runtime.master
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NodeError(
            f"MASTER_ADDR={host}: does not resolve on {here} ({error.strerror}). Start torchrun "
            "with an address that every node resolves (--rdzv-endpoint or --master-addr), or with "
            "--standalone on one machine"
        ) from None

    if not runtime.agent_keeps_store:
        return [Finding("ok", "network", f"{host} resolves")]
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT).close()
    except OSError as error:
        raise NodeError(
            f"MASTER_ADDR={host}, MASTER_PORT={port}: does not accept connections from {here} "
            f"({error.strerror or error}). Open the port in the firewalls between the nodes, or "
            f"use another one: --rdzv-endpoint or --master-port. {NEW_TORCHRUN}"
        ) from None
    return [Finding("ok", "network", f"{host}:{port} accepts connections")]


def check_shared(root: Path, runtime: Runtime) -> Finding:
    """Check that every node can write to `root` and sees a file that rank 0 writes there.

    Collective.

    Raises:
        ConfigError: Rank 0 cannot write there, or another node does not see its file or cannot
            write.
    """
    here = socket.gethostname()

    def write() -> str:
        try:
            root.mkdir(parents=True, exist_ok=True)
            token = root / f".token-{here}-{os.getpid()}-{time.time_ns()}"
            token.touch()
        except OSError as error:
            raise ConfigError(
                f"runs_dir={root}: cannot create the run directory there ({error.strerror}). Use a "
                f"directory that {here} can write to"
            ) from None
        return token.name

    token = root / runtime.broadcast_from_rank0("token", write)
    problem = "" if runtime.local_rank else _try_token(token, runtime.rank)

    def require_shared(problems: list[str]) -> None:
        token.unlink(missing_ok=True)
        if problem := "; ".join(filter(None, problems)):
            raise ConfigError(
                f"runs_dir={root}: is not shared by all nodes: {problem}. Use the absolute path of "
                "a directory on a file system that every node has mounted for writing"
            )

    runtime.gather_and_decide("shared", problem, require_shared)
    return Finding(
        "ok", "runs_dir", f"{root} is writable" + (" and shared" if runtime.nodes > 1 else "")
    )


def _try_token(token: Path, rank: int) -> str:
    """Return what is wrong with the directory of `token` on this node; "" if nothing is wrong."""
    here = socket.gethostname()
    deadline = time.monotonic() + TOKEN_WAIT
    while not token.exists():
        if time.monotonic() > deadline:
            return f"{here} does not see the file that rank 0 wrote there"
        time.sleep(0.1)
    own_token = token.with_name(f"{token.name}-{rank}")
    try:
        own_token.touch()
        own_token.unlink()
    except OSError as error:
        return f"{here} cannot write to it ({error.strerror})"
    return ""


def check_shared_memory(loaders: Iterable[Loader], ranks: int) -> None:
    """Check that the batches in shared memory fit on the node that calls it.

    Without the check, a worker dies of SIGBUS.

    Args:
        loaders: All loaders of a rank, which keep their batches ready at the same time.
        ranks: Number of ranks of this node.

    Raises:
        NodeError: They do not fit.
    """
    needed = ranks * sum(loader.shared_bytes for loader in loaders)
    free = free_shared_memory()
    if needed > free:
        raise NodeError(
            f"data.loader=workers: the batches on {socket.gethostname()} need "
            f"{needed / 2**20:,.1f} MiB of shared memory, and {SHARED_MEMORY} has "
            f"{free / 2**20:,.1f} MiB free. Lower data.num_workers (0 needs none) or batch_size, "
            f"or enlarge {SHARED_MEMORY}: in a container `docker run "
            f"--shm-size={math.ceil(2 * needed / 2**30)}g`, under Kubernetes a volume emptyDir "
            "with medium: Memory"
        )
