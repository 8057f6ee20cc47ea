"""Weights in a directory of safetensors, of which each rank reads its own part only.

    DIR/model.safetensors.index.json   {"weight_map": {"lm_head.weight": "model-00002.safetensors"}}
    DIR/model-00001.safetensors ...

That is the layout of transformers. A small model has one file, model.safetensors, and no index.
The model is constructed with its buffers, but without data of its parameters. When the strategy has
divided it, each rank reads what it has: shards under fsdp, stages under a pipeline.
"""

import json
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ddp_lab.config.errors import ConfigError, NodeError, count
from ddp_lab.models.chain import tie, tied_parameters
from ddp_lab.models.initial_weights import Weights, tensors_of
from ddp_lab.models.trial import LARGE

FILE = "model.safetensors"
INDEX = f"{FILE}.index.json"


class StoredTensor:
    """A tensor in a safetensors file, which is read when it is indexed.

    Args:
        path: of the file.
        name: of the tensor.
        shape, dtype: of it.
    """

    def __init__(self, path: Path, name: str, shape: torch.Size, dtype: torch.dtype):
        self.path = path
        self.name = name
        self.shape = shape
        self.dtype = dtype

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        """Read a part: a slice of each dimension. Nothing else of the file is read."""
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            stored = file.get_slice(self.name)
            return stored[part] if part else file.get_tensor(self.name)

    def read(self) -> torch.Tensor:
        """Read the complete tensor."""
        return self[tuple(slice(None) for _ in self.shape)]


def open_directory(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a directory by name, without reading them.

    Args:
        path: with `INDEX` and the files that it names, or with `FILE`.

    Raises:
        NodeError: a file is missing or cannot be read on this machine.
        ConfigError: a file is not one of safetensors, or does not have what the index says.
    """
    from safetensors import SafetensorError, safe_open

    key = f"model.weights={path}"
    index = path / INDEX
    try:
        places: Mapping[str, str] | None = None
        if index.exists():
            places = json.loads(index.read_text())["weight_map"]
        elif not (path / FILE).exists():
            raise ConfigError(
                f"{key}: has neither {INDEX} nor {FILE}. Use a directory of safetensors, as "
                "save_pretrained and trainer.save write it, or the path of a file; of a sharded "
                f"checkpoint `ddp-lab merge RUN --checkpoint {path}` makes one"
            )
        files = sorted({FILE} if places is None else {*places.values()})
        stored: dict[str, StoredTensor] = {}
        for name in files:
            if Path(name).name != name:
                raise ConfigError(f"{key}: {INDEX} names {name}, which is outside the directory")
            with safe_open(path / name, framework="pt") as file:
                for tensor in file.keys():  # noqa: SIM118, it is no dict
                    # an empty part has the dtype, and nothing is read
                    part = file.get_slice(tensor)
                    shape = torch.Size(part.get_shape())
                    dtype = part[:0].dtype if shape else file.get_tensor(tensor).dtype
                    stored[tensor] = StoredTensor(path / name, tensor, shape, dtype)
    except OSError as error:
        reason = f"{error.filename or ''} {error.strerror or error}".strip()
        raise NodeError(
            f"{key}: cannot be read on {socket.gethostname()} ({reason}). Use a directory that "
            "every machine can read"
        ) from None
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{key}: is damaged or no directory of safetensors ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''})"
        ) from None
    if places is not None and (missing := sorted(places.keys() - stored.keys())):
        raise ConfigError(
            f"{key}: {INDEX} names {count(len(missing), 'tensor')} missing in its files: "
            f"{', '.join(missing[:3])}. Copy all files of the directory again"
        )
    return stored


@contextmanager
def parameters_on_meta() -> Generator[None]:
    """Let modules that are constructed in the body have parameters without data.

    Their buffers have data, because those that are not saved, such as the frequencies of rotary
    embeddings, are only computed by a constructor.
    """

    def without_data(module: nn.Module, name: str, parameter: Any) -> Any:
        if not isinstance(parameter, nn.Parameter) or parameter.is_meta:
            return parameter  # a parameter with several names stays one
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(without_data)
    try:
        yield
    finally:
        handle.remove()


def build_without_data(build: Callable[[], nn.Module]) -> nn.Module:
    """Return what `build` constructs, the parameters of a large model on the meta device.

    A small model has its initial weights, so that trials can compute with values.

    Args:
        build: constructs the model. It is called again if the model is small, or if its constructor
            needs the values of parameters.
    """
    model = None
    with suppress(Exception), parameters_on_meta():
        model = build()
    if model is not None and sum(each.numel() for each in model.parameters()) > LARGE:
        return model
    return build()


class StoredWeights(Weights):
    """The weights of a model: of its parameters those in a directory, else those that it has.

    Args:
        model: complete. What is not in the directory has data; the rest may be on the meta device.
        stored: tensors in the directory by name.
    """

    def __init__(self, model: nn.Module, stored: Mapping[str, StoredTensor | torch.Tensor]):
        self.stored = stored
        self.drawn = {
            name: tensor for name, tensor in tensors_of(model).items() if name not in stored
        }

    @torch.no_grad()
    def fill(
        self,
        blocks: nn.Module,
        device: torch.device,
        put: Callable[[Any, torch.Tensor], None],
    ) -> None:
        """Allocate blocks, and read their weights, one tensor at a time."""
        tied = tied_parameters(blocks)
        blocks.to_empty(device=device)
        tie(blocks, tied)
        for name, tensor in tensors_of(blocks).items():
            put(self.stored[name] if name in self.stored else self.drawn[name], tensor)


def with_tied_names(
    stored: dict[str, StoredTensor], groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return tensors under all names of the parameters that they belong to.

    Files have each of them once.

    Args:
        stored: by name.
        groups: names of each parameter that has several.
    """
    complete: dict[str, Any] = dict(stored)
    for names in groups:
        first = next((name for name in names if name in stored), None)
        if first is not None:
            complete |= {name: stored[first] for name in names if name not in stored}
    return complete
