"""What can be wrong with the machines and not with the config: names, ports, the run directory, the disk.

train.py asks before it opens the process group, `python -m ddp_lab.doctor` at any time. What the config alone can get wrong is
refused where it is read: by the strategies, by Plan, by the datasets, by RunDir.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.observe.logger import log
from ddp_lab.resilience.run_directory import find_launch
from ddp_lab.world.process import launch_id
from ddp_lab.world.runtime import Runtime

ANSWER_WAIT = 10.0  # seconds that the ranks' store has to take a connection
TOKEN_WAIT = 3.0  # seconds after which every node must see a new file: network file systems remember that there was none


class Finding(NamedTuple):
    level: Literal["ok", "warning", "error"]
    about: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:8} {self.about}: {self.text}"


def check_network(runtime: Runtime) -> list[Finding]:
    """Whether the ranks can find each other. Call it before the first `agree`, which would wait in vain.

    Raises:
        NodeError: they cannot.
    """
    if runtime.world_size == 1:
        return []
    # On one machine torch falls back to the loopback address, and says so itself.
    return [check_master(runtime)] + ([check_host_name(runtime)] if runtime.several_nodes else [])


def check_storage(runtime: Runtime, root: Path, name: str | None, checkpoint: int, keep: int, on_error: str) -> list[Finding]:
    """Whether all nodes see one `runs_dir` and the run's checkpoints find room in it. Collective; before anything is written.

    Raises:
        ConfigError: the nodes do not share it, or not even one checkpoint would fit.
    """
    shared = [check_shared(root, runtime)] if runtime.several_nodes else []  # on one RunDir finds out
    return [*shared, _agree_on(runtime, "free_disk", lambda: check_free_disk(root, name, checkpoint, keep, on_error))]


def warn(findings: list[Finding], runtime: Runtime) -> None:
    """Logs the warnings among them, once a node. When logging is set up."""
    for finding in findings:
        if finding.level == "warning" and runtime.local_rank == 0:
            log.warning(finding.text)


def _agree_on(runtime: Runtime, key: str, find: Callable[[], Finding]) -> Finding:
    return Finding(*json.loads(runtime.agree(key, lambda: json.dumps(find()))))


def check_host_name(runtime: Runtime) -> Finding:
    """This machine's name must lead to an address of this machine: gloo listens on it and tells it to the others.

    Raises:
        NodeError: it does not, and gloo connects several nodes.
    """
    host = socket.gethostname()
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as listener:
            listener.bind(address)
        return Finding("ok", "host name", f"{host} is {address[0]}, and a port can be bound there")
    except OSError as error:
        problem = (
            f"the host name {host} does not lead to an address of this machine ({error.strerror}). Mend its /etc/hosts, or set "
            "GLOO_SOCKET_IFNAME to the network interface that leads to the other nodes"
        )
    if runtime.several_nodes and runtime.device.type == "cpu" and "GLOO_SOCKET_IFNAME" not in os.environ:
        raise NodeError(problem)
    return Finding("warning", "host name", problem)


def check_master(runtime: Runtime) -> Finding:
    """The ranks' store must answer, or where rank 0 is to open it, its port must be free.

    Raises:
        NodeError: MASTER_ADDR does not resolve, nothing answers there, or the port is taken.
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
                f"MASTER_ADDR={host}: does not resolve on {here} ({error.strerror}). Give torchrun an address that every node "
                "resolves (--rdzv-endpoint or --master-addr), or --standalone on one machine"
            ) from None
    if runtime.agent_keeps_store:
        return _check_answer(host, port)
    if runtime.rank != 0:
        return Finding("ok", "ports", f"{host} resolves on {here}; rank 0 is to open port {port} there")
    try:
        with socket.socket() as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(("", port))  # not listening: the other ranks may be knocking already
    except OSError as error:
        text = f"port {port} of {here} cannot be opened ({error.strerror}). Start torchrun with --standalone, or with another "
        text += "port: --master-port or --rdzv-endpoint"
        if runtime.world_size == 1:  # which needs none
            return Finding("warning", "ports", text)
        raise NodeError(f"MASTER_PORT={port}: {text}") from None
    return Finding("ok", "ports", f"{port} of {here} is free")


def _check_answer(host: str, port: int) -> Finding:
    try:
        socket.create_connection((host, port), timeout=ANSWER_WAIT).close()
    except OSError as error:
        raise NodeError(
            f"MASTER_ADDR={host}, MASTER_PORT={port}: does not answer {socket.gethostname()} ({error.strerror or error}). "
            "Open the port in the firewalls between the nodes, or choose another one: --rdzv-endpoint or --master-port"
        ) from None
    return Finding("ok", "ports", f"{host}:{port} answers")


def check_shared(root: Path, runtime: Runtime) -> Finding:
    """Every node must see what another one writes in `root`, and write there: rank 0's file is read on each. Collective.

    Raises:
        ConfigError: rank 0 cannot write in it, or other nodes do not see it or cannot write.
    """
    here = socket.gethostname()

    def write() -> str:
        try:
            root.mkdir(parents=True, exist_ok=True)
            token = root / f".token-{here}-{os.getpid()}-{time.time_ns()}"
            token.touch()
        except OSError as error:
            raise ConfigError(
                f"runs_dir={root}: cannot make the run directory there ({error.strerror}). Choose a directory that {here} can "
                "write in"
            ) from None
        return token.name

    token = root / runtime.agree("token", write)
    problem = "" if runtime.local_rank else _try_token(token)
    problems = runtime.collect("token", problem)

    def conclude() -> Finding:
        token.unlink(missing_ok=True)
        if found := "; ".join(filter(None, problems)):
            raise ConfigError(
                f"runs_dir={root}: is not one directory for all nodes: {found}. Choose one on a file system that every node "
                "has mounted for writing, by its absolute path"
            )
        return Finding("ok", "runs_dir", f"{root} can be written" + (" and is shared" if runtime.several_nodes else ""))

    return _agree_on(runtime, "shared", conclude)


def _try_token(token: Path) -> str:
    """What is wrong with `token`'s directory on this node; empty: nothing."""
    here = socket.gethostname()
    deadline = time.monotonic() + TOKEN_WAIT
    while not token.exists():
        if time.monotonic() > deadline:
            return f"{here} does not see what rank 0 has written there"
        time.sleep(0.1)
    own = token.with_name(f"{token.name}-{here}-{os.getpid()}")
    try:
        own.touch()
        own.unlink()
    except OSError as error:
        return f"{here} cannot write there ({error.strerror})"
    return ""


def checkpoint_bytes(optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], model: nn.Module) -> int:
    """Bytes of a checkpoint's tensors: the model's, and what the optimizer keeps for each parameter (momentum), all plain."""
    probe = nn.Parameter(torch.zeros(2))
    probe.grad = torch.zeros(2)
    steps = optimizer([probe])
    steps.step()
    kept = sum(torch.is_tensor(value) and value.shape == probe.shape for value in steps.state[probe].values())
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    return sum(tensor.nbytes for tensor in model.state_dict().values()) + kept * parameters


def check_free_disk(root: Path, name: str | None, checkpoint: int, keep: int, on_error: str) -> Finding:
    """Room for checkpoint.keep checkpoints and the one being written, less what the run has there already. On rank 0's node;
    quotas are not seen.

    Args:
        root, name: of the run directory, as in the config.
        checkpoint: bytes of one.
        keep, on_error: of checkpoints, as in the config.

    Raises:
        ConfigError: there is none for a single one, and checkpoint.on_error=stop.
    """
    one = checkpoint
    name = name or find_launch(root, launch_id())
    held = sum(file.stat().st_size for file in (root / name / "checkpoints").glob("step_*.pt")) if name else 0
    needed = max(one, (keep + 1) * one - held)
    folder = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    text = (
        f"{free / 2**20:,.1f} MiB are free at {folder}; a checkpoint takes {one / 2**20:,.1f} MiB, and checkpoint.keep={keep} "
        f"of them and the one being written {needed / 2**20:,.1f} MiB{' more' if held else ''}"
    )
    if free >= needed:
        return Finding("ok", "free disk", text)
    text = f"runs_dir={root}: {text}. Make room, choose another runs_dir, or lower checkpoint.keep"
    if free < one and on_error == "stop":
        raise ConfigError(text)
    return Finding("warning", "free disk", text)
