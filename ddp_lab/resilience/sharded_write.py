"""Writing a sharded checkpoint: every rank copies and writes only what the ranks have agreed that it writes.

main thread     plan (collective) | copy this rank's share to the host | step  step  step ...
writer thread                                                          | write, fsync, hash | gather | manifest, rename (rank 0)

torch.distributed.checkpoint makes the plan and the format of the files: a replicated tensor is written by one of the ranks that
hold it, a shard by its rank. Its function `async_save` copies everything that a rank holds before it plans, which under ddp is
the whole model on every rank. Here the plan comes first, so no rank needs more host memory than its share.
"""

import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from ddp_lab.resilience.sharded_files import (
    METADATA,
    STATE,
    SUFFIX,
    FileRecord,
    publish_shards,
    record_file,
    sync,
    write_manifest,
)
from ddp_lab.world.runtime import Runtime

if TYPE_CHECKING:  # it loads 700 modules in 0.5 s
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

# A rank waits for the others' files in its writer thread, and the watchdog ends the launch when it waits too long itself.
WRITE_TIMEOUT = timedelta(hours=1)


@dataclass
class Share:
    """This rank's share of a checkpoint.

    Attributes:
        plan: the parts of tensors that this rank writes.
        copies: these parts, on the host.
        metadata: which part of which tensor is where, on rank 0.
    """

    plan: "SavePlan"
    copies: "dict[MetadataIndex, torch.Tensor]"
    metadata: "Metadata | None"

    def resolve_data(self, write_item: "WriteItem") -> torch.Tensor:
        """Return a part. Torch's writer calls this method."""
        return self.copies[write_item.index]


Written = tuple[list["WriteResult"], dict[str, FileRecord]]  # where a rank's parts are, and its file


def write_share(folder: Path, share: Share) -> Written:
    """Write this rank's file to a directory, and sync it to the disk.

    Raises:
        OSError, RuntimeError: the file cannot be written.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    folder.parent.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)
    writer = FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)  # the tensors are already on the host
    results = writer.write_data(share.plan, cast("SavePlanner", share)).wait()
    names = {result.storage_data.relative_path for result in results}
    return results, {name: record_file(folder / name) for name in names}


class ShardWriter:
    """Writes sharded checkpoints. Collective: every rank constructs it, and calls `share` and `write` equally often.

    Attributes:
        write_share: writes this rank's file. Fault injection replaces it.
    """

    def __init__(self, runtime: Runtime):
        self.rank, self.world_size = runtime.rank, runtime.world_size
        # A group of its own: the writer thread must not send messages among those of the training, which NCCL or gloo order.
        self.group: dist.ProcessGroup | None = None
        if self.world_size > 1:
            group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
            assert isinstance(group, dist.ProcessGroup)  # torch has a number for ranks outside the group
            self.group = group
        self.write_share: Callable[[Path, Share], Written] = write_share

    def share(self, tensors: dict[str, torch.Tensor], note: Any) -> tuple[Share, list[Any]]:
        """Divide the tensors of all ranks among the ranks, and copy this rank's share to the host. Call it in the main thread.

        Args:
            tensors: what this rank holds, by key. Shards are DTensors, and a tensor that several ranks have is written once.
            note: a small object for rank 0.

        Returns:
            The share; and on rank 0 the notes of all ranks, in order of rank.
        """
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors)
        gathered = self._gather((planner.create_local_plan(), note))
        plans, metadata = planner.create_global_plan([plan for plan, _ in gathered]) if gathered else ([], None)
        plan = planner.finish_plan(self._scatter(FileSystemWriter(Path()).prepare_global_plan(plans)))
        parts = {item.index: planner.resolve_data(item) for item in plan.items}
        copies = {index: part.detach().to("cpu", copy=True) for index, part in parts.items() if torch.is_tensor(part)}
        return Share(plan, copies, metadata), [note for _, note in gathered or []]

    def write(self, folder: Path, share: Share, state: dict[str, Any]) -> None:
        """Write a sharded checkpoint under its final name. Call it in the writer thread, of which there is one.

        Args:
            folder: the final name. Until all files are complete, it has another one.
            share: this rank's share.
            state: everything but tensors, for torch.save; on rank 0.

        Raises:
            OSError, RuntimeError: on rank 0, a rank cannot write its file. No file remains.
        """
        temporary = folder.with_suffix(f"{SUFFIX}.tmp")
        results: list[Any] = []
        files: dict[str, FileRecord] = {}
        problem: str | None = None
        try:
            results, files = self.write_share(temporary, share)
        except Exception as error:  # whatever it is, rank 0 must hear of it: it waits
            problem = f"rank {self.rank}: {error}"
        share.copies.clear()
        gathered = self._gather((results, files, problem))
        if gathered is None:
            return
        try:
            if problems := [problem for *_, problem in gathered if problem]:
                raise OSError(problems[0])
            assert share.metadata is not None  # on rank 0
            share.metadata.storage_data = {result.index: result.storage_data for part in gathered for result in part[0]}
            with (temporary / METADATA).open("wb") as file:
                pickle.dump(share.metadata, file)
                sync(file)
            with (temporary / STATE).open("wb") as file:
                torch.save(state, file)
                sync(file)
            own = {name: record_file(temporary / name) for name in (METADATA, STATE)}
            write_manifest(temporary, own | {name: record for part in gathered for name, record in part[1].items()})
            publish_shards(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on rank 0, and None on the others."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values

    def _scatter(self, values: list[Any]) -> Any:
        """Return on each rank its own of rank 0's values."""
        if self.group is None:
            return values[0]
        own: list[Any] = [None]
        dist.scatter_object_list(own, values if self.rank == 0 else None, src=0, group=self.group)
        return own[0]
