"""Checks of the machines before a run: host names, ports, shared memory. Those of the disk are in storage.py.

train.py runs them before it opens the process group. Mistakes in the config are reported by the code that reads it: the
strategies, Plan, the datasets, RunDir.
"""

import math
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from ddp_lab.config.errors import NodeError
from ddp_lab.data.loader import Loader
from ddp_lab.observe.log import log
from ddp_lab.world.runtime import Runtime
from ddp_lab.world.store import NEW_TORCHRUN

CONNECT_TIMEOUT = 10.0  # seconds within which the ranks' store must accept a connection
SHARED_MEMORY = Path("/dev/shm")  # where torch's worker processes put tensors on Linux


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


def warn(findings: list[Finding], runtime: Runtime) -> None:
    """Log the warnings among `findings` once per node. Call it after logging is set up."""
    for finding in findings:
        if finding.level == "warning" and runtime.local_rank == 0:
            log.warning(finding.text)


def check_network(runtime: Runtime) -> list[Finding]:
    """Check that the ranks can connect to each other. Call it before the first `agree`, which would hang otherwise.

    Raises:
        NodeError: They cannot connect to each other.
    """
    if runtime.world_size == 1:
        return []
    # The host name matters on several machines only: on one, torch falls back to the loopback address and logs it.
    return [check_master(runtime)] + ([check_host_name(runtime)] if runtime.nodes > 1 else [])


def check_host_name(runtime: Runtime) -> Finding:
    """Check that this machine's host name resolves to one of its own addresses: gloo listens there, and tells the other ranks.

    Raises:
        NodeError: The name does not resolve to such an address, and gloo is to connect the nodes.
    """
    host = socket.gethostname()
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as listener:
            listener.bind(address)
        return Finding("ok", "host name", f"{host} resolves to {address[0]}, and a port can be bound there")
    except OSError as error:
        problem = (
            f"the host name {host} does not resolve to an address of this machine ({error.strerror}). Correct its /etc/hosts, "
            "or set GLOO_SOCKET_IFNAME to the network interface that connects it to the other nodes"
        )
    if runtime.device.type == "cpu" and "GLOO_SOCKET_IFNAME" not in os.environ:
        raise NodeError(problem)
    return Finding("warning", "host name", problem)


def check_master(runtime: Runtime) -> Finding:
    """Check that the ranks' store accepts connections, or that its port is free if rank 0 has to open it.

    Raises:
        NodeError: MASTER_ADDR does not resolve, nothing accepts connections there, or the port is in use.
    """
    here, (host, port) = socket.gethostname(), runtime.master
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NodeError(
            f"MASTER_ADDR={host}: does not resolve on {here} ({error.strerror}). Start torchrun with an address that every "
            "node resolves (--rdzv-endpoint or --master-addr), or with --standalone on one machine"
        ) from None
    try:
        if runtime.agent_keeps_store:
            socket.create_connection((host, port), timeout=CONNECT_TIMEOUT).close()
        elif runtime.rank == 0:
            with socket.socket() as opened:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                opened.bind(("", port))  # no listen(), because the other ranks may already try to connect
    except OSError as error:
        if runtime.agent_keeps_store:
            raise NodeError(
                f"MASTER_ADDR={host}, MASTER_PORT={port}: does not accept connections from {here} ({error.strerror or error}). "
                "Open the port in the firewalls between the nodes, or use another one: --rdzv-endpoint or --master-port. "
                f"{NEW_TORCHRUN}"
            ) from None
        raise NodeError(
            f"MASTER_PORT={port}: cannot be opened on {here} ({error.strerror}). Start torchrun with --standalone, or with "
            "another port: --master-port or --rdzv-endpoint"
        ) from None
    return Finding("ok", "ports", f"{host}:{port} {'accepts connections' if runtime.agent_keeps_store else 'can be opened'}")


def check_shared_memory(loaders: Iterable[Loader], ranks: int) -> None:
    """Check that the batches in shared memory fit on the node that calls it; without the check, a worker dies of SIGBUS.

    Args:
        loaders: All loaders of a rank, which keep their batches ready at the same time.
        ranks: Number of ranks of this node.

    Raises:
        NodeError: They do not fit.
    """
    needed = ranks * sum(loader.shared_bytes for loader in loaders)
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else math.inf
    if needed > free:
        raise NodeError(
            f"data.loader=workers: the batches on {socket.gethostname()} need {needed / 2**20:,.1f} MiB of shared memory, and "
            f"{SHARED_MEMORY} has {free / 2**20:,.1f} MiB free. Lower data.num_workers (0 needs none) or "
            f"batch_size, or enlarge {SHARED_MEMORY}: in a container `docker run --shm-size={math.ceil(2 * needed / 2**30)}g`, "
            "under Kubernetes a volume emptyDir with medium: Memory"
        )
