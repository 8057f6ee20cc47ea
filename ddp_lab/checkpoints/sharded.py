"""Sharded checkpoints: a directory to which every rank writes its shards, with torch.distributed.checkpoint (DCP).

main thread     copy this rank's shards to the host | step  step  step ...
writer thread                                       | plan, write, fsync, hash | rank 0: state.json, SHA256SUMS, rename

The files are safetensors. Other formats of DCP have pickled metadata, which executes code if somebody has changed it.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ddp_lab.checkpoints.files import STATE, SUMS, remove, sha256, sync_folder, write_text
from ddp_lab.checkpoints.state import KEYS, Shapes, State, Write, check_shapes, reading, require_keys
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.saved_state import merge
from ddp_lab.training.progress import Progress
from ddp_lab.world.runtime import Runtime

# A rank waits for the others' files in its writer thread, and the watchdog ends the launch when it waits too long itself.
WRITE_TIMEOUT = timedelta(hours=1)
# Torch needs up to three times the size of a file to write it, besides the copy of the tensors.
FILE_BYTES = 2**28

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a rank that writes alone or reads on its own


def tensors_of(state: State) -> dict[str, torch.Tensor]:
    """Return this rank's tensors by key: model.NAME, ema.NAME and optimizer.NAME.KEY. Shards are DTensors. Nothing is copied.

    An optimizer without a state gets its initial one.
    """
    model = state.strategy.local_model_state()
    averages = {} if state.ema is None else state.ema.shards()
    optimizer = state.strategy.local_optimizer_state(state.optimizer)["state"]
    tensors = {f"model.{name}": tensor for name, tensor in model.items()}
    tensors |= {f"ema.{name}": tensor for name, tensor in averages.items() if name in model}
    tensors |= {f"optimizer.{name}.{key}": value for name, held in optimizer.items() for key, value in held.items()}
    return {key: tensor for key, tensor in tensors.items() if torch.is_tensor(tensor)}


def copy_shards(state: State) -> dict[str, torch.Tensor]:
    """Return copies of this rank's tensors in host memory. The first of several replicas copies, the others have nothing."""

    def is_first(tensor: torch.Tensor) -> bool:
        if not isinstance(tensor, DTensor):
            return state.strategy.dp_rank == 0
        axes = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
        return all(index == 0 for index, placement in axes if placement.is_replicate())

    mine = {key: tensor.detach() for key, tensor in tensors_of(state).items() if is_first(tensor)}
    return {key: tensor.to("cpu", copy=True).contiguous() for key, tensor in mine.items()}


def describe(state: State, progress: Progress) -> str:
    """Return this rank's part of what is not a tensor, under KEYS, as JSON."""
    optimizer = state.strategy.local_optimizer_state(state.optimizer)
    held = {
        name: {key: value for key, value in values.items() if not torch.is_tensor(value)}
        for name, values in optimizer["state"].items()
    }
    optimizer |= {"state": {name: values for name, values in held.items() if values}}
    rest = {"progress": asdict(progress), "seed": state.seed, "scheduler": state.scheduler.state_dict(), "optimizer": optimizer}
    # Learning rates are tensors on the GPU with CUDA graphs. Of options that are objects the description is enough: a resume
    # takes options from the config, and compares their names.
    return json.dumps(rest, default=lambda value: value.item() if torch.is_tensor(value) else str(value))


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
        self.folder, self.before = folder, before
        self.digests: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.before()
        files: dict[str, int] = {}
        size = 0
        for item in plan.items:
            assert item.tensor_data is not None
            files[item.index.fqn] = size // FILE_BYTES + 1
            size += item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        written = super().write_data(replace(plan, storage_data=plan.storage_data | {"fqn_to_index_mapping": files}), planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        self.digests = {name: sha256(self.folder / name) for name in names}
        return written


class ShardWriter:
    """Writes sharded checkpoints. Collective: every rank constructs it, and copies and writes equally often."""

    def __init__(self, runtime: Runtime):
        self.rank, self.world_size = runtime.rank, runtime.world_size
        # A group of its own: the writer thread must not send messages among those of the training, which NCCL or gloo order.
        group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT) if self.world_size > 1 else None
        self.group = cast("dist.ProcessGroup | None", group)  # torch has a number for ranks outside the group

    def copy(self, state: State, progress: Progress) -> Write:
        """Copy this rank's part of the state, and return what writes it. Call it in the main thread.

        Returns:
            A function for the writer thread, of the final name of the directory, and of what to call before this rank writes.
            It raises an OSError or a RuntimeError if a rank cannot write its files. No file remains then.
        """
        tensors = copy_shards(state)
        plain = describe(state, progress)

        def write(path: Path, before: Callable[[], None]) -> None:
            temporary = path.with_suffix(f"{path.suffix}.tmp")
            writer = SafetensorsWriter(temporary, before)
            try:
                save(tensors, storage_writer=writer, process_group=self.group, no_dist=self.group is None)
                tensors.clear()
                mine = json.loads(plain) | {"model": {}, "digests": writer.digests}
                parts = [mine] * self.world_size if self.rank == 0 else None
                if self.group is not None:
                    dist.gather_object(mine, parts, dst=0, group=self.group)
                if parts:
                    publish(temporary, path, parts)
            except CheckpointException as error:
                rank, (cause, _) = next(iter(error.failures.items()))
                raise OSError(f"rank {rank}: {cause}") from None
            finally:
                if self.rank == 0:
                    shutil.rmtree(temporary, ignore_errors=True)

        return write


def publish(temporary: Path, path: Path, parts: list[dict[str, Any]]) -> None:
    """Complete a directory with the shards of all ranks by what is not a tensor and by its hashes, and rename it. On rank 0.

    Args:
        temporary: the directory.
        path: its final name.
        parts: of each rank: what is not a tensor, and "digests", the SHA-256 of its files by name.
    """
    state = {key: parts[0][key] for key in KEYS} | {"optimizer": merge(parts)["optimizer"]}
    write_text(temporary / STATE, json.dumps(state))
    digests = {name: digest for part in parts for name, digest in part["digests"].items()}
    digests |= {STATE: sha256(temporary / STATE)}
    write_text(temporary / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())))
    sync_folder(temporary)
    if path.exists():  # a directory that is not empty cannot be replaced by renaming another
        remove(path)
    os.rename(temporary, path)
    sync_folder(path.parent)


class ShardedCheckpoint:
    """A sharded checkpoint whose hashes have been checked. Tensors are read when they are loaded, each rank its shards.

    Args:
        path: the directory.
        key: what the user sets to the path, for messages.

    Attributes:
        state: everything but tensors: the keys "progress", "seed", "scheduler" and "optimizer".
        has_averages: whether it has averages of the weights.

    Raises:
        ConfigError: its files are not those of a sharded checkpoint.
    """

    def __init__(self, path: Path, key: str = "resume="):
        self.path, self.about = path, f"{key}{path}"
        with reading(self.about):
            self.state: dict[str, Any] = json.loads((path / STATE).read_text())
            require_keys(self.state, KEYS)
            metadata = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
            self._tensors = cast("dict[str, TensorStorageMetadata]", metadata)
            for name, tensor in self._tensors.items():
                if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
                    raise ValueError(f"shards of {name} are missing")
        self._names = [key.removeprefix("model.") for key in self._tensors if key.startswith("model.")]
        self.has_averages = any(key.startswith("ema.") for key in self._tensors)

    def check(self, shapes: Shapes) -> None:
        """Check that the weights are those of a model. Raises a ConfigError that names the first tensor that differs."""
        check_shapes(self.about, {name: tuple(self._tensors[f"model.{name}"].size) for name in self._names}, shapes)

    @torch.no_grad()
    def read(self, tensors: dict[str, torch.Tensor]) -> None:
        """Read into tensors by key, in place: full ones or DTensors, on any device. One shard at a time is in host memory."""
        load(tensors, storage_reader=HuggingFaceStorageReader(str(self.path)), no_dist=True)

    def _read_weights(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Read the weights to evaluate, their averages if there are any, into tensors by name, and return these."""
        self.read({f"{'ema' if f'ema.{name}' in self._tensors else 'model'}.{name}": tensors[name] for name in tensors})
        return tensors

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights to evaluate, in host memory."""
        return self._read_weights({name: self._empty(f"model.{name}") for name in self._names})

    def load_weights(self, strategy: Strategy) -> None:
        """Load the weights to evaluate: this rank's part of them."""
        self._read_weights(strategy.local_model_state())

    def load(self, state: State) -> None:
        """Load model, optimizer and averages: this rank's part of them. Averages start from the weights if there are none."""
        self.read({key: tensor for key, tensor in tensors_of(state).items() if key in self._tensors})
        rest: dict[str, dict[str, Any]] = self.state["optimizer"]["state"]
        saved = {key.removeprefix("optimizer.").rpartition(".")[0] for key in self._tensors if key.startswith("optimizer.")}
        for name, parameter in state.strategy.module.named_parameters():
            if name in rest:
                state.optimizer.state[parameter].update(rest[name])
            elif name not in saved:  # it had no gradient before, or SGD had no momentum: remove its initial state
                state.optimizer.state.pop(parameter, None)
        if state.ema and not self.has_averages:
            state.ema.begin_again()

    def full(self) -> dict[str, Any]:
        """Return the content of a checkpoint of one file: full tensors in host memory, once."""
        tensors = {key: self._empty(key) for key in self._tensors}
        self.read(tensors)
        values = {name: dict(held) for name, held in self.state["optimizer"]["state"].items()}
        model = {name: tensors.pop(f"model.{name}") for name in self._names}
        ema = {"ema": {name: tensors.pop(f"ema.{name}", model[name]) for name in model}} if self.has_averages else {}
        for key, tensor in tensors.items():
            name, _, what = key.removeprefix("optimizer.").rpartition(".")
            values.setdefault(name, {})[what] = tensor
        optimizer = {"state": values, "param_groups": self.state["optimizer"]["param_groups"]}
        return {key: self.state[key] for key in KEYS} | ema | {"model": model, "optimizer": optimizer}

    def _empty(self, key: str) -> torch.Tensor:
        return torch.empty(self._tensors[key].size, dtype=self._tensors[key].properties.dtype)
