"""The distributed environment of a rank: its devices, its process group, and the other ranks.

Only files of this subpackage read the environment variables that torchrun sets (RANK, LOCAL_RANK,
WORLD_SIZE, ...).
"""

import gc
import math
import os
import socket
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import TracebackType
from typing import ClassVar

import torch
import torch.distributed as dist

# Documented as torch.distributed.Store etc., but the module does not export them explicitly.
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh

from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.world.device import card_of, find_device, half_dtype, list_devices, peak_flops
from ddp_lab.world.process import RankInfo, die_with_torchrun
from ddp_lab.world.ranks import Ranks

# seconds that rank 0 keeps its store open after an error, for the other ranks to read the message
STORE_GRACE = 1.0


class Runtime(Ranks):
    """Rank, device and process group of this process.

    Use it as a context manager. Objects that use the process group must be local to a function
    called inside it: an object that still refers to the group (a DDP module, for example) can make
    its destruction at exit hang.

    Attributes:
        device: The device of this rank.
        devices: The devices that a one-process strategy may use: every visible GPU, the requested
            one, or the CPU. "auto" means the CUDA GPUs if there are any, else the CPU. A Mac's GPU
            (mps) must be requested: it has never been tested here. Each rank may see another GPU
            only.
        half: the dtype of mixed precision; None with precision=float32.

    Args:
        device: The config key `device`.
        precision: "float32", "bf16" or "fp16".
        timeout: Timeout of the collectives, in seconds.
        rank_info: Which rank this is; None: torchrun's environment variables say it.

    Raises:
        NodeError: The device does not exist, there are more ranks than GPUs, or the device does not
            support the precision.
        ConfigError: Several ranks were started with device=mps.
    """

    is_planned: ClassVar[bool] = False  # whether the launch is only planned, on fake tensors

    def __init__(
        self,
        device: str = "auto",
        precision: str = "float32",
        timeout: float = 600.0,
        rank_info: RankInfo | None = None,
    ):
        super().__init__(rank_info or RankInfo.of(os.environ), timedelta(seconds=timeout))
        self.precision = precision
        self.half = half_dtype(precision)
        self._meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}
        self._kept: list[object] = []
        die_with_torchrun()  # also for the ranks of scripts, which are no commands
        self.devices = self._choose_devices(device)
        self.device = self.devices[self.local_rank if len(self.devices) > 1 else 0]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _choose_devices(self, name: str) -> list[torch.device]:
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        first = find_device(name)
        if name == "mps" and self.world_size > 1:
            raise ConfigError(
                f"device=mps: is not supported by {self.world_size} ranks: a Mac has one such "
                "device, and gloo and NCCL do not support its tensors. Start one process (ddp-lab "
                "train device=mps), or set device=cpu"
            )

        if name in ("cpu", "mps"):
            return [first]
        if name == "cuda":
            devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        else:
            devices = [first]

        if self.local_world_size > len(devices) and not self._sees_only_its_gpu(name, devices):
            remedy = f"Use --nproc_per_node={len(devices)}, or set device=cpu"
            if name != "cuda":
                remedy += ", or select GPUs with CUDA_VISIBLE_DEVICES and device=cuda"
            raise NodeError(
                f"device={name}: {self.local_world_size} ranks on {socket.gethostname()} need one "
                f"GPU each, but this setting provides {len(devices)}. Available: {list_devices()}. "
                f"{remedy}"
            )
        return devices

    def _sees_only_its_gpu(self, name: str, devices: list[torch.device]) -> bool:
        """Return whether each rank of this machine sees one GPU, and no other rank sees it.

        Collective on the ranks of a machine that see fewer GPUs than it has ranks.

        Slurm's --gpus-per-task does that. Each rank then has cuda:0.
        """
        if name != "cuda" or len(devices) != 1:
            return False
        from ddp_lab.world.visible_gpu import differ  # most launches do without it

        return differ(self, str(torch.cuda.get_device_properties(devices[0]).uuid))

    @contextmanager
    def side_stream(self) -> Generator[None, None, None]:
        """Queue all work on a CUDA stream other than the default one, which cannot be captured.

        Enter it before `Strategy.setup`. Work that waits for the default stream cannot be captured
        either, and a DDP module constructed on the default stream makes its gradients wait for that
        stream.
        """
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def free_memory(self) -> int:
        """Return the free bytes of this rank's GPU."""
        return torch.cuda.mem_get_info(self.device)[0]

    def peak_flops(self) -> float | None:
        """Return the FLOP/s of this rank's card by its data sheet; None without a known card."""
        if self.device.type == "cuda":
            return peak_flops(card_of(torch.cuda.get_device_name()), self.precision)
        return None

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of mixed precision for the forward pass.

        With precision=float32 it excludes an outer one.
        """
        if self.half is None and not torch.is_autocast_enabled(self.device.type):
            return nullcontext()  # a step of small kernels on a CPU notices torch's
        return torch.autocast(self.device.type, self.half, enabled=self.half is not None)

    def open_group(self) -> None:
        """Open the process group if it is not open: NCCL between GPUs, gloo between CPUs."""
        if dist.is_initialized():
            return
        cuda = self.device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=self.timeout,
            device_id=self.device if cuda else None,
        )

    def mesh(self, axes: dict[str, int]) -> DeviceMesh:
        """Return a device mesh over all ranks, the same one for the same axes.

        Collective; it needs the process group.

        The last axis varies fastest: {"dp": 2, "pp": 2} has one pipeline of ranks 0-1 and one of
        2-3. The groups are made here and not by `init_device_mesh`, which would give them torch's
        default timeout of up to 30 minutes. They are kept until the process group closes, because
        NCCL keeps 0.8 GiB of a GPU for each (two H200s, torch 2.11, 2026-11-23).

        Args:
            axes: Size of each axis by name; their product must be the world size.
        """
        key = tuple(axes.items())
        if key not in self._meshes:
            self._meshes[key] = self._make_mesh(axes)
        return self._meshes[key]

    def keep(self, value: object) -> None:
        """Keep an object until the process group closes.

        Something that ranks construct together, and find again later, must live equally long on all
        of them. Without this it would live until each rank collects its garbage.
        """
        self._kept.append(value)

    def _make_mesh(self, axes: dict[str, int]) -> DeviceMesh:
        ranks = torch.arange(math.prod(axes.values())).reshape(*axes.values())
        groups = []
        for dim in range(ranks.dim()):
            rows = ranks.movedim(dim, -1).reshape(-1, ranks.size(dim))
            group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=self.timeout)
            groups.append(group)
        return DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0],
            self.device.type,
            ranks,
            mesh_dim_names=tuple(axes),
        )

    def all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """Sum `tensor` over all ranks in place, or combine it otherwise, and return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op)
        return tensor

    def on_any_rank(self, here: bool) -> bool:
        """Return whether a value is true on any rank. Collective; it waits for the device."""
        return bool(
            self.all_reduce(torch.tensor(float(here), device=self.device), dist.ReduceOp.MAX)
        )

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Only after success: the frames in an error's traceback keep objects alive that refer to
        # the group.
        self._meshes.clear()
        self._kept.clear()
        if kind is None and dist.is_initialized():
            gc.collect()  # objects in reference cycles that refer to the group must be freed first
            dist.destroy_process_group()
        if isinstance(error, Exception) and self.is_main and self.world_size > 1:
            self.answer_with(error)
            if not self.agent_keeps_store:
                time.sleep(STORE_GRACE)  # the store closes with this process
        self._store = None
