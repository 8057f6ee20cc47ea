"""Reading a sharded checkpoint into tensors of any layout, without executing code from its files.

The file `.metadata` is a pickle, which torch.distributed.checkpoint loads without restrictions: a crafted one runs code. Here
only the classes of torch's own metadata are loaded from it. Tensors are read with weights_only, and what is not a tensor is
refused: torch would load it without that restriction.
"""

import io
import math
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.resilience.checkpoint_files import check_shapes
from ddp_lab.resilience.sharded_files import METADATA, STATE, read_manifest

if TYPE_CHECKING:  # it loads 700 modules in 0.5 s
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

CHECKPOINT = "torch.distributed.checkpoint"
ALLOWED = {
    (f"{CHECKPOINT}.metadata", "Metadata"),
    (f"{CHECKPOINT}.metadata", "TensorStorageMetadata"),
    (f"{CHECKPOINT}.metadata", "TensorProperties"),
    (f"{CHECKPOINT}.metadata", "ChunkStorageMetadata"),
    (f"{CHECKPOINT}.metadata", "MetadataIndex"),
    (f"{CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # returns the layout of a name
}
KEYS = {"progress", "seed", "scheduler", "names", "optimizer"}  # of state.pt


class MetadataUnpickler(pickle.Unpickler):
    """An unpickler that loads no classes and functions but those of a sharded checkpoint's metadata."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        is_dtype = module_name == "torch" and isinstance(vars(torch).get(global_name), torch.dtype)
        if is_dtype or (module_name, global_name) in ALLOWED:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}")


def read_metadata(folder: Path) -> "Metadata":
    """Return where the parts of the tensors are.

    Raises:
        ValueError: it is not the metadata of tensors in the files of the manifest.
    """
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    try:
        metadata = MetadataUnpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
        tensors, parts = metadata.state_dict_metadata, metadata.storage_data
        names = {part.relative_path for part in parts.values() if part.transform_descriptors is None}
        whole = all(
            isinstance(tensor, TensorStorageMetadata)  # torch would unpickle others without restrictions
            and sum(math.prod(chunk.sizes) for chunk in tensor.chunks) == tensor.size.numel()
            for tensor in tensors.values()
        )
    except Exception as error:  # unpickling a crafted file may raise any
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if not (isinstance(metadata, Metadata) and whole and names <= (read_manifest(folder) or {}).keys()):
        raise ValueError("it does not describe complete tensors in the files of this checkpoint")
    return metadata


class ShardedCheckpoint:
    """A sharded checkpoint whose hashes have been checked (`damage_of_shards`). Not collective.

    Keys of the tensors are `model.NAME`, `ema.NAME` and `optimizer.NAME.STATE`, for example optimizer.head.weight.exp_avg.

    Args:
        folder: the directory.
        key: what the user sets to the path, for messages.

    Attributes:
        state: everything but tensors: the keys "progress", "seed", "scheduler", "names" (of the complete model's tensors, in
            its order) and "optimizer", of which "state" has only values that are not tensors.
        shapes: the shapes of the complete tensors by key.

    Raises:
        ConfigError: its files are not those of a sharded checkpoint.
    """

    def __init__(self, folder: Path | str, key: str = "resume="):
        self.folder, self.key = Path(folder), key
        try:
            self.metadata = read_metadata(self.folder)
            self.state: dict[str, Any] = torch.load(self.folder / STATE, map_location="cpu", weights_only=True)
            if missing := KEYS - self.state.keys():
                raise ValueError(f"{STATE} lacks {', '.join(sorted(missing))}")
        except (ValueError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).split("\n")[0]
            raise ConfigError(f"{key}{folder}: cannot be read as a sharded checkpoint ({reason}). Use another one") from None
        self._tensors = cast("dict[str, TensorStorageMetadata]", self.metadata.state_dict_metadata)
        self.shapes = {name: tuple(tensor.size) for name, tensor in self._tensors.items()}

    def has(self, section: str) -> bool:
        """Return whether there are tensors of a section: model, ema or optimizer."""
        return any(name.startswith(f"{section}.") for name in self.shapes)

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Check that the weights are those of a model.

        Args:
            shapes: the shape of each tensor of the complete model, by name.

        Raises:
            ConfigError: a tensor is missing, superfluous, or of another shape.
        """
        prefix = "model."
        saved = {name.removeprefix(prefix): shape for name, shape in self.shapes.items() if name.startswith(prefix)}
        check_shapes(f"{self.key}{self.folder}", saved, shapes, self.key == "resume=")

    @torch.no_grad()
    def read(self, tensors: dict[str, torch.Tensor]) -> None:
        """Read into tensors, in place. One saved part is in host memory at a time.

        Args:
            tensors: complete tensors or DTensors on any device, by key. Each key must be in `shapes`.
        """
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        reader = FileSystemReader(self.folder)
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, self.metadata)
        reader.read_data(planner.create_local_plan(), planner).wait()

    def weights(self, names: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors by the key under which the weights to evaluate are: the averages if there are any.

        Args:
            names: tensors of the model by name.
        """
        averaged = {name: f"ema.{name}" for name in names}
        return {averaged[name] if averaged[name] in self.shapes else f"model.{name}": names[name] for name in names}

    def whole(self) -> dict[str, Any]:
        """Return the content of a checkpoint of one file: complete tensors in host memory, once."""
        tensors = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in self._tensors.items()}
        self.read(tensors)
        state = dict(self.state)
        names: list[str] = state.pop("names")
        model = {name: tensors[f"model.{name}"] for name in names}
        values: dict[str, dict[str, Any]] = {}
        for key, tensor in tensors.items():
            section, _, rest = key.partition(".")
            if section == "optimizer":
                name, _, what = rest.rpartition(".")
                values.setdefault(name, {})[what] = tensor
        plain = state["optimizer"]["state"]
        ordered = {name: values.get(name, {}) | plain.get(name, {}) for name in names if name in values or name in plain}
        averages = {"ema": {name: tensors.get(f"ema.{name}", model[name]) for name in names}} if self.has("ema") else {}
        return state | {"model": model, "optimizer": state["optimizer"] | {"state": ordered}} | averages
