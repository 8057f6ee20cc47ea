"""Sharded checkpoints: a directory to which every rank writes its shards.

torch.distributed.checkpoint (DCP) writes and reads them.

main thread     copy shards to the host | step  step  step  step  step  step ...
writer thread                           | plan, write, fsync, hash | rank 0: SHA256SUMS, rename

Each rank copies its own shards. Before SHA256SUMS rank 0 writes state.json: all but the tensors.

The files are safetensors. Other formats of DCP have pickled metadata, which executes code if
somebody has changed it.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ddp_lab.checkpoints.files import STATE, SUMS, remove, sha256, sync, write_text
from ddp_lab.checkpoints.saved import SavedCheckpoint, require_keys
from ddp_lab.checkpoints.state import KEYS, State, Write, merge
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.progress import Progress
from ddp_lab.world.runtime import Runtime

# A rank waits for the others' files in its writer thread, and the watchdog ends the launch when it
# waits too long itself.
WRITE_TIMEOUT = timedelta(hours=1)
# Torch needs up to three times the size of a file to write it, besides the copy of the tensors.
FILE_BYTES = 2**28

# a rank that writes alone or reads on its own
warnings.filterwarnings("ignore", "torch.distributed is disabled")


def copies_of(strategy: Strategy, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of this rank's tensors in host memory.

    The first of several replicas copies, the others have nothing.
    """

    def is_first(tensor: torch.Tensor) -> bool:
        if not isinstance(tensor, DTensor):
            return strategy.dp_rank == 0
        axes = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
        return all(index == 0 for index, placement in axes if placement.is_replicate())

    mine = {key: tensor.detach() for key, tensor in tensors.items() if is_first(tensor)}
    return {key: tensor.to("cpu", copy=True).contiguous() for key, tensor in mine.items()}


class SafetensorsWriter(HuggingFaceStorageWriter):
    """Writes this rank's safetensors files of about FILE_BYTES each.

    Args:
        folder: the directory.
        before: called before this rank writes.

    Attributes:
        digests: the SHA-256 of the files by name.
    """

    def __init__(self, folder: Path, before: Callable[[], None]):
        super().__init__(str(folder), save_distributed=True)
        self.per_thread_copy_ahead = 0  # the tensors are on the host already
        self.folder = folder
        self.before = before
        self.digests: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.before()
        files: dict[str, int] = {}
        size = 0
        for item in plan.items:
            assert item.tensor_data is not None
            files[item.index.fqn] = size // FILE_BYTES + 1
            size += (
                item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
            )

        written = super().write_data(
            replace(plan, storage_data=plan.storage_data | {"fqn_to_index_mapping": files}), planner
        )
        names = {result.storage_data.relative_path for result in written.wait()}
        self.digests = {name: sha256(self.folder / name) for name in names}
        return written


class ShardWriter:
    """Writes sharded checkpoints.

    Collective: every rank constructs it, and copies and writes equally often.
    """

    def __init__(self, runtime: Runtime):
        self.rank = runtime.rank
        self.world_size = runtime.world_size
        # A group of its own: the writer thread must not send messages among those of the training,
        # which NCCL or gloo order.
        group = None
        if self.world_size > 1:
            group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        # torch has a number for ranks outside the group
        self.group = cast("dist.ProcessGroup | None", group)

    def copy(self, state: State, progress: Progress) -> Write:
        """Copy this rank's part of the state, and return what writes it.

        Call it in the main thread.

        Returns:
            A function for the writer thread, of the final name of the directory, and of what to
            call before this rank writes. It raises an OSError or a RuntimeError if a rank cannot
            write its files. No file remains then.
        """
        tensors, plain = state.part(progress)
        tensors = copies_of(state.strategy, tensors)

        def write(path: Path, before: Callable[[], None]) -> None:
            temporary = path.with_suffix(f"{path.suffix}.tmp")
            writer = SafetensorsWriter(temporary, before)
            try:
                save(
                    tensors,
                    storage_writer=writer,
                    process_group=self.group,
                    no_dist=self.group is None,
                )
                tensors.clear()
                mine = json.loads(plain) | {"digests": writer.digests}
                parts = [mine] * self.world_size if self.rank == 0 else None
                if self.group is not None:
                    dist.gather_object(mine, parts, dst=0, group=self.group)
                if parts:
                    publish(temporary, path, parts)
            except CheckpointException as error:
                from ddp_lab.world.write_errors import system_error

                rank, (cause, _) = next(iter(error.failures.items()))
                of_system = system_error(cause)
                if of_system is None:
                    raise OSError(f"rank {rank}: {cause}") from None
                raise OSError(of_system.errno, f"rank {rank}: {of_system.strerror}") from None
            finally:
                if self.rank == 0:
                    shutil.rmtree(temporary, ignore_errors=True)

        return write


def publish(temporary: Path, path: Path, parts: list[dict[str, Any]]) -> None:
    """Complete a directory with the shards of all ranks, and rename it.

    Add what is not a tensor, and the hashes.

    On rank 0.

    Args:
        temporary: the directory.
        path: its final name.
        parts: of each rank: what is not a tensor, and "digests", the SHA-256 of its files by name.
    """
    write_text(temporary / STATE, json.dumps(merge(parts)))
    digests = {name: digest for part in parts for name, digest in part["digests"].items()}
    digests |= {STATE: sha256(temporary / STATE)}
    write_text(
        temporary / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    )
    sync(temporary)
    if path.exists():  # a directory that is not empty cannot be replaced by renaming another
        remove(path)
    os.rename(temporary, path)
    sync(path.parent)


class ShardedCheckpoint(SavedCheckpoint):
    """A sharded checkpoint. Tensors are read when they are loaded, each rank its shards."""

    def open(self) -> None:
        self.state = json.loads((self.path / STATE).read_text())
        require_keys(self.state, KEYS)
        metadata = HuggingFaceStorageReader(str(self.path)).read_metadata().state_dict_metadata
        self.tensors = {}
        for key, tensor in cast("dict[str, TensorStorageMetadata]", metadata).items():
            if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
                raise ValueError(f"shards of {key} are missing")
            self.tensors[key] = torch.empty(
                tensor.size, dtype=tensor.properties.dtype, device="meta"
            )

    @torch.no_grad()
    def read(self, tensors: dict[str, torch.Tensor]) -> None:
        """Read into tensors by key, in place: full ones or DTensors, on any device.

        One shard at a time is in host memory.
        """
        load(tensors, storage_reader=HuggingFaceStorageReader(str(self.path)), no_dist=True)
