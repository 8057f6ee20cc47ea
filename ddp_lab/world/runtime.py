"""Where this process stands among the ranks, and the life of the process group.

Only this file and process.py read the variables that torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, ...).
"""

import gc
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.world.process import die_with_torchrun, env_int

DECISION_TIMEOUT = timedelta(minutes=30)  # a slow dataset download is the longest thing the other ranks wait for
LAST_WORDS = 1.0  # seconds that a store outlives the mistake which ends its rank


def list_devices() -> str:
    """The devices of this machine in words, for messages."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    gpus = [f"cuda:{i} ({gpu.name}, {gpu.total_memory / 2**30:.0f} GiB)" for i, gpu in enumerate(gpus)]
    gpus += ["mps"] if torch.backends.mps.is_available() else []
    return ", ".join(["cpu", *gpus]) + ("" if gpus else " (no GPU is visible)")


def find_device(name: str, key: str = "device") -> torch.device:
    """The device called `name`: "cpu", "cuda", "cuda:N" or "mps".

    Raises:
        NodeError: no such device on this machine.
    """
    kind, _, index = name.partition(":")
    number = int(index or 0)
    if kind == "cuda":
        there = number < torch.cuda.device_count()
    else:
        there = name == "cpu" or (name == "mps" and torch.backends.mps.is_available())
    if not there:
        raise NodeError(f"{key}={name}: there is no such device on {socket.gethostname()}. Here are: {list_devices()}")
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, number)


class Runtime:
    """Rank, device and process group of this process.

    Use it as a context manager, and keep whatever uses the group local to a function called inside: an object that
    still holds the group (a DDP module, say) can hang its destruction at exit.

    Attributes:
        rank, world_size: this process among all; 0 and 1 without torchrun.
        local_rank, local_world_size: the same among the processes of this machine.
        device: this rank's own device.
        devices: all that a one-process strategy may use: every visible GPU, or the one asked for, or the CPU. "auto" chooses
            CUDA's GPUs or else the CPU; a Mac's GPU (mps) is used only when asked for, because it was never tested here.

    Raises:
        NodeError: the device is not there, there are more ranks than GPUs, or the precision is not supported by the device.
        ConfigError: several ranks were started with device=mps.
    """

    def __init__(self, device: str = "auto", precision: str = "float32", timeout: float = 600.0):
        self.rank, self.world_size = env_int("RANK", 0), env_int("WORLD_SIZE", 1)
        self.local_rank, self.local_world_size = env_int("LOCAL_RANK", 0), env_int("LOCAL_WORLD_SIZE", 1)
        self.precision = precision
        self.timeout = timedelta(seconds=timeout)
        self._store: dist.Store | None = None
        self._questions = 0
        die_with_torchrun()
        self._refuse_restarts_over_a_shared_store()
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
                f"device={name}: {self.local_world_size} ranks on {socket.gethostname()} need a GPU each, but there are "
                f"{len(devices)} to choose from. Here are: {list_devices()}. "
                f"Start --nproc_per_node={len(devices)}, or set device=cpu"
                + ("" if name == "cuda" else ", or choose GPUs by CUDA_VISIBLE_DEVICES and device=cuda")
            )
        return devices

    def _check_mps(self) -> None:
        if self.world_size > 1:
            raise ConfigError(
                f"device=mps: is not supported by {self.world_size} ranks: a Mac has one such device, and gloo and NCCL do not "
                "take its tensors. Start one process (python train.py device=mps), or set device=cpu"
            )
        if self.precision == "bf16" and not torch.backends.mps.is_macos_or_newer(14, 0):
            raise NodeError(
                "precision=bf16: is not supported by device=mps before macOS 14. Use precision=float32, or a newer macOS"
            )

    @property
    def under_torchrun(self) -> bool:
        return "TORCHELASTIC_RUN_ID" in os.environ

    @property
    def several_nodes(self) -> bool:
        return self.local_world_size < self.world_size

    @property
    def master(self) -> tuple[str, int] | None:
        """Host and port of the ranks' store; None for a process without other ranks."""
        return (os.environ["MASTER_ADDR"], env_int("MASTER_PORT", 29500)) if "MASTER_ADDR" in os.environ else None

    @property
    def agent_keeps_store(self) -> bool:
        """Whether torchrun's agent has the store open before any rank starts; else rank 0 opens it."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def _refuse_restarts_over_a_shared_store(self) -> None:
        if self.several_nodes and env_int("TORCHELASTIC_MAX_RESTARTS", 0) > 0 and self.agent_keeps_store:
            raise ConfigError(
                "--max-restarts on several nodes: a restart would meet the dead ranks' addresses in torchrun's store, and "
                "often hang. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node before torchrun, as "
                "scripts/slurm/train.sbatch does"
            )

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Queue all work on a stream other than the default one, from which CUDA graphs cannot be captured. What waits for the
        default stream cannot be captured either, as the gradients of a DDP made there do: enter it before `Strategy.setup`."""
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def autocast(self) -> torch.autocast:
        """Mixed precision for the forward pass; a no-op with precision=float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    @property
    def store(self) -> dist.Store:
        """The key-value store that torchrun's agent keeps; reachable before any process group exists."""
        if self._store is None:
            if self.world_size == 1 and "MASTER_ADDR" not in os.environ:
                self._store = dist.HashStore()
            else:
                store, _, _ = next(rendezvous("env://", timeout=self.timeout))
                # The agent's store outlives a restart, and so do the dead ranks' addresses in it: one prefix an attempt.
                # Attempts are counted per agent, so over several nodes the count is no common name.
                attempt = 0 if self.several_nodes else env_int("TORCHELASTIC_RESTART_COUNT", 0)
                self._store = dist.PrefixStore(f"attempt_{attempt}", store)
        return self._store

    def agree(self, key: str, decide: Callable[[], str | None], per_node: bool = False) -> str | None:
        """Runs `decide` on rank 0 (`per_node`: on the first rank of each machine) and returns its answer on every rank.

        Works before the process group is open. A ConfigError of the decider is raised on all ranks.
        """
        if self.world_size == 1:
            return decide()
        self._questions += 1
        key = f"{key}/{self._questions}"  # so that the same question can be asked again
        if per_node:
            key = f"{key}/{env_int('GROUP_RANK', 0)}"
        if (self.local_rank if per_node else self.rank) == 0:
            try:
                answer = {"value": decide()}
            except ConfigError as error:
                self.store.set(key, json.dumps({"error": str(error)}))
                raise
            self.store.set(key, json.dumps(answer))
            return answer["value"]
        self.store.wait([key], DECISION_TIMEOUT)
        answer = json.loads(self.store.get(key))
        if "error" in answer:
            raise ConfigError(answer["error"])
        return answer["value"]

    def collect(self, key: str, value: str) -> list[str] | None:
        """What the ranks passed as `value`, in order of rank, on rank 0; None on the others, which do not wait.

        Works before the process group is open.
        """
        if self.world_size == 1:
            return [value]
        self._questions += 1
        keys = [f"{key}/{self._questions}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], value)
        if self.rank != 0:
            return None
        self.store.wait(keys, DECISION_TIMEOUT)
        return [answer.decode() for answer in self.store.multi_get(keys)]

    def open_group(self) -> None:
        """Opens the process group, unless it is open: NCCL between GPUs, gloo between CPUs."""
        if dist.is_initialized():
            return
        cuda = self.device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=self.timeout,
            device_id=self.device if cuda else None,
        )

    def mesh(self, axes: dict[str, int]) -> DeviceMesh:
        """Lays the ranks on named axes, the last one running fastest: {"dp": 2, "pp": 2} has the pipelines 0-1 and 2-3.

        The groups are made here and not by `init_device_mesh`, which would give them torch's own timeout of up to 30 minutes.
        Collective; in an open group.
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

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of `tensor` over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        # Only after success: an error's frames keep objects alive that hold the group.
        if kind is None and dist.is_initialized():
            gc.collect()  # what holds the group in a cycle of references must go before it, too
            dist.destroy_process_group()
        if isinstance(error, ConfigError) and self.rank == 0 and self.world_size > 1 and not self.agent_keeps_store:
            time.sleep(LAST_WORDS)  # the others read the reason from the store that ends here
        self._store = None
