"""Whether the ranks can connect to each other: host names, addresses, ports."""

import os
import socket

from ddp_lab.config.errors import NodeError
from ddp_lab.launch.preflight.finding import Finding
from ddp_lab.world.attempt import NEW_TORCHRUN
from ddp_lab.world.runtime import Runtime

CONNECT_TIMEOUT = 10.0  # seconds within which the ranks' store must accept a connection


def check_network(runtime: Runtime) -> list[Finding]:
    """Check that the ranks can connect to each other. Call it before the first `agree`, which would hang otherwise.

    Raises:
        NodeError: They cannot connect to each other.
    """
    if runtime.world_size == 1:
        return []
    # The host name matters on several machines only: on one, torch falls back to the loopback address and logs it.
    return [check_master(runtime)] + ([check_host_name(runtime)] if runtime.several_nodes else [])


def check_host_name(runtime: Runtime) -> Finding:
    """Check that this machine's host name resolves to one of its own addresses.

    gloo listens at that address and sends it to the other ranks.

    Raises:
        NodeError: The name does not resolve to such an address, and gloo is to connect several nodes.
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
    if runtime.several_nodes and runtime.device.type == "cpu" and "GLOO_SOCKET_IFNAME" not in os.environ:
        raise NodeError(problem)
    return Finding("warning", "host name", problem)


def check_master(runtime: Runtime) -> Finding:
    """Check that the ranks' store accepts connections, or that its port is free if rank 0 has to open it.

    Raises:
        NodeError: MASTER_ADDR does not resolve, nothing accepts connections there, or the port is in use.
    """
    here = socket.gethostname()
    if runtime.master is None:
        host, port = here, 29500
    else:
        host, port = runtime.master
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise NodeError(
                f"MASTER_ADDR={host}: does not resolve on {here} ({error.strerror}). Start torchrun with an address that every "
                "node resolves (--rdzv-endpoint or --master-addr), or with --standalone on one machine"
            ) from None
    if runtime.agent_keeps_store:
        return _check_answer(host, port)
    if runtime.rank != 0:
        return Finding("ok", "ports", f"{host} resolves on {here}; rank 0 will open port {port} there")
    try:
        with socket.socket() as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(("", port))  # no listen(), because the other ranks may already try to connect
    except OSError as error:
        text = f"port {port} of {here} cannot be opened ({error.strerror}). Start torchrun with --standalone, or with another "
        text += "port: --master-port or --rdzv-endpoint"
        if runtime.world_size == 1:  # one rank needs no port
            return Finding("warning", "ports", text)
        raise NodeError(f"MASTER_PORT={port}: {text}") from None
    return Finding("ok", "ports", f"{port} of {here} is free")


def _check_answer(host: str, port: int) -> Finding:
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT).close()
    except OSError as error:
        raise NodeError(
            f"MASTER_ADDR={host}, MASTER_PORT={port}: does not accept connections from {socket.gethostname()} "
            f"({error.strerror or error}). Open the port in the firewalls between the nodes, or use another one: "
            f"--rdzv-endpoint or --master-port. {NEW_TORCHRUN}"
        ) from None
    return Finding("ok", "ports", f"{host}:{port} accepts connections")
