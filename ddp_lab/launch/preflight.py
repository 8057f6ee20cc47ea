"""Checks of the machines before a run: host names, ports, the run directory, the disk.

train.py runs them before it opens the process group, and `python -m ddp_lab.doctor` reports all of them. Mistakes in the config
are reported by the code that reads it: the strategies, Plan, the datasets, RunDir.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from torch import nn

from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.estimate.optimizer_state import MakeOptimizer, state_of
from ddp_lab.observe.logger import log
from ddp_lab.resilience.run_directory import find_launch
from ddp_lab.world.attempt import NEW_TORCHRUN
from ddp_lab.world.runtime import Runtime

CONNECT_TIMEOUT = 10.0  # seconds within which the ranks' store must accept a connection
TOKEN_WAIT = 3.0  # seconds within which every node must see a new file; network file systems cache the absence of a file


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        level: How serious it is.
        about: Name of the check.
        text: What was found and, for a warning or an error, the remedy.
    """

    level: Literal["ok", "warning", "error"]
    about: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:8} {self.about}: {self.text}"


def check_network(runtime: Runtime) -> list[Finding]:
    """Check that the ranks can connect to each other. Call it before the first `agree`, which would hang otherwise.

    Raises:
        NodeError: They cannot connect to each other.
    """
    if runtime.world_size == 1:
        return []
    # The host name matters on several machines only: on one, torch falls back to the loopback address and logs it.
    return [check_master(runtime)] + ([check_host_name(runtime)] if runtime.several_nodes else [])


def check_storage(
    runtime: Runtime, root: Path, name: str | None, checkpoint: int, keep: int, best: bool, on_error: str
) -> list[Finding]:
    """Check that all nodes share `runs_dir` and that the run's checkpoints fit on its disk.

    Collective. Call it before anything is written.

    Args:
        runtime: The ranks.
        root: The config key `runs_dir`.
        name: The config key `name`.
        checkpoint: Size of one checkpoint in bytes.
        keep, on_error: The config keys `checkpoint.keep` and `checkpoint.on_error`.
        best: Whether the best checkpoint is kept, too.

    Raises:
        ConfigError: The nodes do not share the directory, or not even one checkpoint fits and `on_error` is "stop".
    """
    shared = [check_shared(root, runtime)] if runtime.several_nodes else []  # on a single node, RunDir checks the directory
    _ = runtime.launch  # all ranks take part

    def find() -> Finding:
        return check_free_disk(root, name or find_launch(root, runtime.launch), checkpoint, keep, best, on_error)

    return [*shared, _agree_on(runtime, "free_disk", find)]


def warn(findings: list[Finding], runtime: Runtime) -> None:
    """Log the warnings among `findings` once per node. Call it after logging is set up."""
    for finding in findings:
        if finding.level == "warning" and runtime.local_rank == 0:
            log.warning(finding.text)


def _agree_on(runtime: Runtime, key: str, find: Callable[[], Finding]) -> Finding:
    return Finding(*json.loads(runtime.agree(key, lambda: json.dumps(find()))))


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


def check_shared(root: Path, runtime: Runtime) -> Finding:
    """Check that every node can write to `root` and sees a file that rank 0 writes there. Collective.

    Raises:
        ConfigError: Rank 0 cannot write there, or another node does not see its file or cannot write.
    """
    here = socket.gethostname()

    def write() -> str:
        try:
            root.mkdir(parents=True, exist_ok=True)
            token = root / f".token-{here}-{os.getpid()}-{time.time_ns()}"
            token.touch()
        except OSError as error:
            raise ConfigError(
                f"runs_dir={root}: cannot create the run directory there ({error.strerror}). Use a directory that {here} can "
                "write to"
            ) from None
        return token.name

    token = root / runtime.agree("token", write)
    problem = "" if runtime.local_rank else _try_token(token, runtime.rank)
    problems = runtime.collect("token", problem)

    def conclude() -> Finding:
        token.unlink(missing_ok=True)
        if found := "; ".join(filter(None, problems or [])):  # only rank 0 runs this function, and it has the list
            raise ConfigError(
                f"runs_dir={root}: is not shared by all nodes: {found}. Use the absolute path of a directory on a file system "
                "that every node has mounted for writing"
            )
        return Finding("ok", "runs_dir", f"{root} is writable" + (" and shared" if runtime.several_nodes else ""))

    return _agree_on(runtime, "shared", conclude)


def _try_token(token: Path, rank: int) -> str:
    """Return what is wrong with the directory of `token` on this node; an empty text if nothing is wrong."""
    here = socket.gethostname()
    deadline = time.monotonic() + TOKEN_WAIT
    while not token.exists():
        if time.monotonic() > deadline:
            return f"{here} does not see the file that rank 0 wrote there"
        time.sleep(0.1)
    own = token.with_name(f"{token.name}-{rank}")
    try:
        own.touch()
        own.unlink()
    except OSError as error:
        return f"{here} cannot write to it ({error.strerror})"
    return ""


def checkpoint_bytes(optimizer: MakeOptimizer, model: nn.Module, ema: bool = False) -> int:
    """Return the size in bytes of a checkpoint's tensors: the unsharded model, its averages and the optimizer's state.

    Args:
        optimizer: Constructs the optimizer of a list of parameters.
        model: The unsharded model.
        ema: Whether the weights are averaged.
    """
    copies, _ = state_of(optimizer)
    parameters = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return (1 + ema) * sum(tensor.nbytes for tensor in model.state_dict().values()) + copies * parameters


def check_free_disk(root: Path, name: str | None, checkpoint: int, keep: int, best: bool, on_error: str) -> Finding:
    """Check the free space on the node that calls it; disk quotas are not taken into account.

    The run needs space for `keep` checkpoints, the best and the one being written, less those that it already has there.

    Args:
        root: The config key `runs_dir`.
        name: The run's directory in `root`; None if it is new.
        checkpoint: Size of one checkpoint in bytes.
        keep, on_error: The config keys `checkpoint.keep` and `checkpoint.on_error`.
        best: Whether the best checkpoint is kept, too.

    Raises:
        ConfigError: Not even one checkpoint fits, and `on_error` is "stop".
    """
    one = checkpoint
    files = [path.stat() for path in (root / name / "checkpoints").rglob("*") if path.is_file()] if name else []
    held = sum({file.st_ino: file.st_size for file in files}.values())  # the best is a second name of a file, as a rule
    needed = max(one, (keep + best + 1) * one - held)
    folder = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    kept = f"{keep} of them{', the best' if best else ''}"
    text = (
        f"{free / 2**20:,.1f} MiB are free at {folder}; a checkpoint takes {one / 2**20:,.1f} MiB, and checkpoint.keep={kept} "
        f"and the one being written need {needed / 2**20:,.1f} MiB{' more' if held else ''}"
    )
    if free >= needed:
        return Finding("ok", "free disk", text)
    text = f"runs_dir={root}: {text}. Free some space, use another runs_dir, or lower checkpoint.keep"
    if free < one and on_error == "stop":
        raise ConfigError(text)
    return Finding("warning", "free disk", text)
