"""The distributed environment: rank, devices, process group, and the key-value store of the ranks.

Only this file, place.py and process.py read the environment variables that torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, ...).
"""

import gc
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

# Documented as torch.distributed.Store etc., but the module does not export them explicitly.
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.world.attempt import agree_on_attempt
from ddp_lab.world.place import Place
from ddp_lab.world.process import die_with_torchrun, env_int, launch_id
from ddp_lab.world.store import CountedStore

START_TIMEOUT = timedelta(minutes=5)  # the shortest timeout for other ranks to start, which import from a slow disk
STORE_GRACE = 1.0  # seconds that rank 0 keeps its store open after an error, for the other ranks to read the message

Answer = TypeVar("Answer", bound=str | list[int] | None)


def list_devices() -> str:
    """Return a description of the devices of this machine, for messages."""
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    gpus = [f"cuda:{i} ({gpu.name}, {gpu.total_memory / 2**30:.0f} GiB)" for i, gpu in enumerate(properties)]
    gpus += ["mps"] if torch.backends.mps.is_available() else []
    return ", ".join(["cpu", *gpus]) + ("" if gpus else " (no GPU is visible)")


def find_device(name: str, key: str = "device") -> torch.device:
    """Return the device called `name`.

    Args:
        name: "cpu", "cuda", "cuda:N" or "mps".
        key: The config key that the error message is about.

    Raises:
        NodeError: This machine does not have the device.
    """
    kind, _, index = name.partition(":")
    number = int(index or 0)
    if kind == "cuda":
        available = number < torch.cuda.device_count()
    else:
        available = name == "cpu" or (name == "mps" and torch.backends.mps.is_available())
    if not available:
        raise NodeError(f"{key}={name}: there is no such device on {socket.gethostname()}. Available: {list_devices()}")
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, number)


class Runtime:
    """Rank, device and process group of this process.

    Use it as a context manager. Objects that use the process group must be local to a function called inside it: an object that
    still refers to the group (a DDP module, for example) can make its destruction at exit hang.

    Attributes:
        rank, world_size: Index of this process and number of processes; 0 and 1 without torchrun.
        local_rank, local_world_size: The same, counting only the processes of this machine.
        node, nodes: Index of this machine and number of machines.
        abandoned: Threads that nothing needs any more, but that may still wait for the store.
        device: The device of this rank.
        devices: The devices that a one-process strategy may use: every visible GPU, the requested one, or the CPU. "auto" means
            the CUDA GPUs if there are any, else the CPU. A Mac's GPU (mps) must be requested: it has never been tested here.

    Args:
        device: The config key `device`.
        precision: "float32" or "bf16".
        timeout: Timeout of the collectives, in seconds.
        place: Which rank this is; None: torchrun's environment variables say it.

    Raises:
        NodeError: The device does not exist, there are more ranks than GPUs, or the device does not support the precision.
        ConfigError: Several ranks were started with device=mps.
    """

    def __init__(self, device: str = "auto", precision: str = "float32", timeout: float = 600.0, place: Place | None = None):
        place = place or Place.of(os.environ)
        self.rank, self.world_size = place.rank, place.world_size
        self.local_rank, self.local_world_size = place.local_rank, place.local_world_size
        self.node, self.nodes = place.node, place.nodes
        self.precision = precision
        self.timeout = timedelta(seconds=timeout)
        self.abandoned: list[threading.Thread] = []
        self._store: CountedStore | None = None
        self._questions = 0
        self._launch: str | None = None
        die_with_torchrun()
        self.devices = self._choose_devices(device)
        self.device = self.devices[self.local_rank if len(self.devices) > 1 else 0]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _choose_devices(self, name: str) -> list[torch.device]:
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        first = find_device(name)
        if name == "mps":
            self._check_mps()
        if name in ("cpu", "mps"):
            return [first]
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if name == "cuda" else [first]
        if self.local_world_size > len(devices):
            raise NodeError(
                f"device={name}: {self.local_world_size} ranks on {socket.gethostname()} need one GPU each, but this "
                f"setting provides {len(devices)}. Available: {list_devices()}. "
                f"Use --nproc_per_node={len(devices)}, or set device=cpu"
                + ("" if name == "cuda" else ", or select GPUs with CUDA_VISIBLE_DEVICES and device=cuda")
            )
        return devices

    def _check_mps(self) -> None:
        if self.world_size > 1:
            raise ConfigError(
                f"device=mps: is not supported by {self.world_size} ranks: a Mac has one such device, and gloo and NCCL do not "
                "support its tensors. Start one process (python -m ddp_lab device=mps), or set device=cpu"
            )
        if self.precision == "bf16" and not torch.backends.mps.is_macos_or_newer(14, 0):
            raise NodeError(
                "precision=bf16: is not supported by device=mps before macOS 14. Use precision=float32, or a newer macOS"
            )

    @property
    def under_torchrun(self) -> bool:
        """Whether torchrun started this process."""
        return "TORCHELASTIC_RUN_ID" in os.environ

    @property
    def several_nodes(self) -> bool:
        """Whether the ranks run on more than one machine."""
        return self.local_world_size < self.world_size

    @property
    def master(self) -> tuple[str, int] | None:
        """Host and port of the ranks' store; None without torchrun."""
        return (os.environ["MASTER_ADDR"], env_int("MASTER_PORT", 29500)) if "MASTER_ADDR" in os.environ else None

    @property
    def agent_keeps_store(self) -> bool:
        """Whether torchrun's agent opens the store before any rank starts; otherwise rank 0 opens it."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @contextmanager
    def side_stream(self) -> Generator[None, None, None]:
        """Queue all work on a CUDA stream other than the default one, from which CUDA graphs cannot be captured.

        Enter it before `Strategy.setup`. Work that waits for the default stream cannot be captured either, and a DDP module
        constructed on the default stream makes its gradients wait for that stream.
        """
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def free_memory(self) -> int:
        """Return the free bytes of this rank's GPU."""
        return torch.cuda.mem_get_info(self.device)[0]

    def autocast(self) -> torch.autocast:
        """Return the context of mixed precision for the forward pass; it does nothing with precision=float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    @property
    def store(self) -> CountedStore:
        """The key-value store of the ranks; it can be used before the process group is open. Collective the first time."""
        if self._store is None:
            if self.world_size == 1 and "MASTER_ADDR" not in os.environ:
                self._store = CountedStore(HashStore())
            else:
                store, _, _ = next(rendezvous("env://", self.rank, self.world_size, timeout=self.timeout))
                shared = CountedStore(store, prefix="attempt")  # counted apart: it depends on how long this rank waits
                self._store = CountedStore(PrefixStore(f"attempt_{self._attempt(shared)}", store), shared.traffic)
        return self._store

    def _attempt(self, store: CountedStore) -> str:
        """Return a name of this start: the agent's store outlives a restart, with the dead ranks' addresses in it."""
        if self.agent_keeps_store:
            return agree_on_attempt(store, self.rank, self.world_size, max(self.timeout, START_TIMEOUT))
        return "0"  # the store is rank 0's, and new at each start

    def agree(self, key: str, decide: Callable[[], Answer], per_node: bool = False) -> Answer:
        """Run `decide` on one rank and return its answer on every rank. Collective; it does not need the process group.

        Args:
            key: Name of the question in the store.
            decide: Returns the answer.
            per_node: Whether `decide` runs on the first rank of each machine, for the ranks of that machine, or only on rank 0.

        Raises:
            ConfigError: `decide` raised it on the rank where it ran.
        """
        if self.world_size == 1:
            return decide()
        self._questions += 1
        key = f"{key}/{self._questions}"  # the same key may be used again
        if per_node:
            key = f"{key}/{self.node}"
        if (self.local_rank if per_node else self.rank) == 0:
            try:
                answer = {"value": decide()}
            except ConfigError as error:
                self.store.set(key, json.dumps({"error": str(error)}))
                raise
            self.store.set(key, json.dumps(answer))
            return answer["value"]
        self.store.wait([key])
        answer = json.loads(self.store.get(key))
        if "error" in answer:
            raise ConfigError(answer["error"])
        return answer["value"]

    def collect(self, key: str, value: str) -> list[str] | None:
        """Gather one string per rank on rank 0. Collective; it does not need the process group.

        Args:
            key: Name of the values in the store.
            value: The string of this rank.

        Returns:
            On rank 0 the values in order of rank; None on the other ranks, which do not wait.
        """
        if self.world_size == 1:
            return [value]
        self._questions += 1
        keys = [f"{key}/{self._questions}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], value)
        if self.rank != 0:
            return None
        self.store.wait(keys)
        return self.store.multi_get(keys)

    @property
    def launch(self) -> str:
        """The identifiers of this launch, one per line: each node's agent has its own. Collective the first time.

        They are complete on rank 0 only.
        """
        if self._launch is None:
            own = launch_id()
            self._launch = "\n".join(dict.fromkeys(self.collect("launch", own) or [own]))
        return self._launch

    def open_group(self) -> None:
        """Open the process group if it is not open: NCCL between GPUs, gloo between CPUs."""
        if dist.is_initialized():
            return
        cuda = self.device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=PrefixStore("group", self.store.base),
            rank=self.rank,
            world_size=self.world_size,
            timeout=self.timeout,
            device_id=self.device if cuda else None,
        )

    def mesh(self, axes: dict[str, int]) -> DeviceMesh:
        """Return a device mesh over all ranks. Collective; it needs the process group.

        The last axis varies fastest: {"dp": 2, "pp": 2} has one pipeline of ranks 0-1 and one of 2-3. The groups are made here
        and not by `init_device_mesh`, which would give them torch's default timeout of up to 30 minutes.

        Args:
            axes: Size of each axis by name; their product must be the world size.
        """
        ranks = torch.arange(math.prod(axes.values())).reshape(*axes.values())
        groups = []
        for dim in range(ranks.dim()):
            rows = ranks.movedim(dim, -1).reshape(-1, ranks.size(dim))
            group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=self.timeout)
            groups.append(group)
        return DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0], self.device.type, ranks, mesh_dim_names=tuple(axes)
        )

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Sum `tensor` over all ranks in place, or combine it by another operation, and return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op)
        return tensor

    def exit_if_abandoned(self, code: int) -> None:
        """Exit at once, without the interpreter's finalization, if an abandoned thread still waits for the store.

        If the store answers a thread during the finalization, C++ code of torch aborts the process. torchrun would take this
        rank, which has finished, for a failed one, and start the ranks of its node again, for which no other node waits.
        """
        if any(thread.is_alive() for thread in self.abandoned):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # Only after success: the frames in an error's traceback keep objects alive that refer to the group.
        if kind is None and dist.is_initialized():
            gc.collect()  # objects in reference cycles that refer to the group must be freed first
            dist.destroy_process_group()
        if isinstance(error, ConfigError) and self.rank == 0 and self.world_size > 1 and not self.agent_keeps_store:
            time.sleep(STORE_GRACE)  # the store closes with this process
        self._store = None
