"""What a run records of its data and its environment, for whoever continues or compares it.

data.json has the data, environment.json what computes with them: versions, devices, the model's
shapes and the files of the user's code.
"""

import hashlib
import importlib.metadata
import platform
import re
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.data.batch import local_order
from ddp_lab.data.dataset import Dataset, InMemory, Samples
from ddp_lab.data.loader import select
from ddp_lab.resilience.run_directory import read_json, write_json
from ddp_lab.training.progress import Criterion

DATA = "data.json"
ENVIRONMENT = "environment.json"
HASHED = 256  # samples of each set
# fields that versions up to 2026-11 did not write
LATER = {"files", "samples", "order"}
# of a config: the classes and functions that it names
TARGET = re.compile(r"(?:_target_: |^\s*- )([A-Za-z_]\w*)\.[\w.]+$", re.MULTILINE)


@dataclass(frozen=True)
class DataRecord:
    """What a model needs to know of the data that it was trained on, from data.json.

    The data themselves may be elsewhere.

    Attributes:
        shape: the arguments of the model that follow from the data, as `Dataset.model_shape`.
        classes: the names of the classes, in the order of the logits.
        digest: that of the dataset, as `Dataset.digest`.
        held_out: how the validation set was chosen among the training samples, as
            `Dataset.held_out`.
        files: hash of each file by its name, as `Dataset.files`.
        criterion: the metric of the validation set by which the best checkpoint is chosen; None:
            the last one is the result.
        samples: the number of samples of each set, with a hash of some where they are in memory.
        order: hash of the order in which the first epoch trains on them, over all ranks; "" of a
            stream.
    """

    shape: dict[str, Any]
    classes: list[str]
    digest: str
    held_out: str
    criterion: Criterion | None
    files: dict[str, str] = field(default_factory=dict[str, str])
    samples: dict[str, str] = field(default_factory=dict[str, str])
    order: str = ""


def record_data(folder: Path, dataset: Dataset, criterion: Criterion | None, seed: int) -> None:
    """Write data.json to a run directory.

    Args:
        folder: the run directory.
        dataset: of the run.
        criterion: as in `DataRecord`.
        seed: of the order of the samples.
    """
    order = ""
    if not dataset.train.is_endless:  # a stream yields its samples in an order of its own
        order = hash_of(local_order(dataset.train.size, 0, 1, seed, 1))
    record = DataRecord(
        shape=dataset.model_shape(),
        classes=dataset.classes,
        digest=dataset.digest,
        held_out=dataset.held_out,
        criterion=criterion,
        files={**dataset.files},
        samples={name: describe_samples(samples) for name, samples in dataset.sets.items()},
        order=order,
    )
    write_json(folder / DATA, asdict(record))


def describe_samples(samples: Samples) -> str:
    """Return the number of samples, and a hash of some of them if they are tensors in memory."""
    if samples.is_endless:
        return "a stream"
    text = count(samples.size, "sample")
    if not isinstance(samples, InMemory):
        return text
    inputs = samples.inputs
    targets = samples.targets
    if not isinstance(inputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return text
    index = torch.linspace(0, samples.size - 1, min(HASHED, samples.size)).long()
    return f"{text}, {hash_of(select(inputs, index), select(targets, index))}"


def hash_of(*tensors: torch.Tensor) -> str:
    """Return 16 digits that identify the values of tensors on the CPU."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def record_environment(
    folder: Path, config: str, devices: str, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Write environment.json to a run directory.

    Args:
        folder: the run directory.
        config: of the run, as text, of which the modules that it names are hashed.
        devices: number and kind of the devices.
        shapes: of the complete model's parameters and buffers, by name.
    """
    try:
        version = importlib.metadata.version("ddp_lab")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    versions = {
        "ddp_lab": version,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    names = hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:16]
    record = {
        "versions": versions,
        "devices": devices,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "model": f"{count(len(shapes), 'tensor')}, {names}",
        "code": code_of(config),
    }
    write_json(folder / ENVIRONMENT, record)


def code_of(config: str) -> dict[str, str]:
    """Return a hash of each file of the modules that a config names, without installed packages."""
    packages = set(TARGET.findall(config)) - {"ddp_lab", "torch"}
    if not packages:
        return {}
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    hashes: dict[str, str] = {}
    # a copy, because another thread may import
    for name, module in sorted(sys.modules.copy().items()):
        if name.partition(".")[0] not in packages:
            continue
        file = getattr(module, "__file__", None)
        if file is None or file.startswith(installed):
            continue
        with suppress(OSError):  # of a module without a file of its own
            hashes[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return hashes


def read_data(folder: Path) -> DataRecord:
    """Read data.json from a run directory.

    Raises:
        ConfigError: it is missing or damaged.
    """
    record = find_data(folder)
    if record is None:
        raise ConfigError(
            f"{folder}: {DATA} is missing or damaged; start the run again with name={folder.name}, "
            "which writes the file, also if it is finished"
        )
    return record


def find_data(folder: Path) -> DataRecord | None:
    """Return the content of data.json; None if it is missing or damaged."""
    record = read_json(folder / DATA)
    if isinstance(record, dict) and LATER | record.keys() == DataRecord.__annotations__.keys():
        return DataRecord(**record)
    return None


def compare_data(folder: Path, dataset: Dataset, resumes: bool) -> str | None:
    """Compare a dataset with what a run has recorded of its own.

    Args:
        folder: the run directory.
        dataset: the dataset of this launch or command.
        resumes: whether the launch continues the training, and so would choose by samples that it
            has trained on.

    Returns:
        A warning if the dataset consists of other files, or holds out samples that may have been
        trained on.

    Raises:
        ConfigError: its classes are others, or have another order, so that its labels are not those
            of the model; or `resumes`, and it holds out other samples.
    """
    record = find_data(folder)
    if record is None:
        return None
    pairs = zip_longest(record.classes, dataset.classes, fillvalue="missing")
    different = [(number, then, now) for number, (then, now) in enumerate(pairs) if then != now]
    if different:
        number, then, now = different[0]
        raise ConfigError(
            f"{folder}: was trained with other classes: number {number} of {len(record.classes)} "
            f"was {then}, in these data it is {now}. Use data with the same classes in the same "
            "order; to train on others, begin a run with another name"
        )

    warnings: list[str] = []
    if record.digest and dataset.digest and record.digest != dataset.digest:
        warnings.append(
            f"{folder}: was trained on other files or samples than these data, so the order of "
            f"samples is another{describe_other_file(record.files, dataset.files)}"
        )

    if record.held_out != dataset.held_out:
        own_classes, recorded = (
            text or "data.val_fraction=0" for text in (dataset.held_out, record.held_out)
        )
        if resumes:
            raise ConfigError(
                f"{own_classes}: {folder} was trained with {recorded}, and a run cannot be resumed "
                "with another validation set. Use the recorded values, or start a new run with "
                "name=NEW resume=never, from these weights with model.weights=CHECKPOINT"
            )
        if dataset.held_out:
            warnings.append(
                f"{own_classes}: {folder} was trained with {recorded}, so its weights may have "
                "been trained on samples that now validate them"
            )
    return "; ".join(warnings) or None


def describe_other_file(recorded: Mapping[str, str], present: Mapping[str, str]) -> str:
    """Return the first file that differs from that of a run, as the end of a message; or ""."""
    for name in sorted({*recorded, *present}):
        if name not in recorded:
            return f"; {name} is new"
        if name not in present:
            return f"; {name} is missing"
        if recorded[name] != present[name]:
            return f"; {name} has changed"
    return ""


def input_shape_of(shape: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a sample's input, or of an image; () if it has several tensors."""
    if "input_shape" not in shape and "in_channels" not in shape:
        return ()
    return tuple(
        shape.get("input_shape") or (shape["in_channels"], shape["image_size"], shape["image_size"])
    )
