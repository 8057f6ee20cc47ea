"""What a run records of its data, in data.json, for launches and commands that continue it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.dataset import Dataset
from ddp_lab.resilience.run_directory import read_json, write_json
from ddp_lab.training.progress import Criterion

DATA = "data.json"


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
    """

    shape: dict[str, Any]
    classes: list[str]
    digest: str
    held_out: str
    criterion: Criterion | None
    files: dict[str, str] = field(default_factory=dict[str, str])


def record_data(folder: Path, dataset: Dataset, criterion: Criterion | None) -> None:
    """Write data.json to a run directory. `criterion` is as in `DataRecord`."""
    record = DataRecord(
        dataset.model_shape(),
        dataset.classes,
        dataset.digest,
        dataset.held_out,
        criterion,
        {**dataset.files},
    )
    write_json(folder / DATA, asdict(record))


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
    # versions up to 2026-11 wrote no files
    if isinstance(record, dict) and {"files", *record} == DataRecord.__annotations__.keys():
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
