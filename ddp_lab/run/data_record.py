"""What a run records of its data, in data.json of the run directory, for launches and commands that continue it."""

from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.samples import Dataset
from ddp_lab.resilience.run_directory import read_json, write_json

DATA = "data.json"


@dataclass(frozen=True)
class DataRecord:
    """What a model needs to know of the data that it was trained on, from data.json. The data themselves may be elsewhere.

    Attributes:
        shape: the arguments of the model that follow from the data: in_channels, image_size and num_classes.
        classes: the names of the classes, in the order of the logits.
        digest: hash of the list of files; empty for datasets that are not lists of files.
        held_out: how the validation set was chosen among the training images, as `Dataset.held_out`.
    """

    shape: dict[str, int]
    classes: list[str]
    digest: str = ""
    held_out: str = ""


def record_data(folder: Path, dataset: Dataset) -> None:
    """Write data.json to a run directory."""
    write_json(folder / DATA, asdict(DataRecord(dataset.model_shape(), dataset.classes, dataset.digest, dataset.held_out)))


def read_data(folder: Path) -> DataRecord:
    """Read data.json from a run directory.

    Raises:
        ConfigError: it is missing or damaged.
    """
    record = find_data(folder)
    if record is None:
        raise ConfigError(
            f"{folder}: {DATA} is missing or damaged; start the run again with name={folder.name}, which writes the "
            "file, also if it is finished"
        )
    return record


def find_data(folder: Path) -> DataRecord | None:
    """Return the content of data.json; None if it is missing or damaged."""
    record = read_json(folder / DATA)
    if not isinstance(record, dict) or not {"shape", "classes"} <= record.keys() <= DataRecord.__annotations__.keys():
        return None
    return DataRecord(**record)


def compare_data(folder: Path, dataset: Dataset) -> str | None:
    """Compare a dataset with that of a run, if the run has recorded it.

    Returns:
        A warning if it consists of other files, or if validation images may be among those that the run has trained on.

    Raises:
        ConfigError: its classes are others, or have another order, so that its labels are not those of the model.
    """
    record = find_data(folder)
    if record is None:
        return None
    pairs = zip_longest(record.classes, dataset.classes, fillvalue="missing")
    if different := [(number, then, now) for number, (then, now) in enumerate(pairs) if then != now]:
        number, then, now = different[0]
        raise ConfigError(
            f"{folder}: was trained with other classes: number {number} of {len(record.classes)} was {then}, in these data it "
            f"is {now}. Use data with the same classes in the same order; to train on others, begin a run with another name"
        )
    if record.digest and dataset.digest and record.digest != dataset.digest:
        return f"{folder}: was trained on another list of files than these data; the order of the samples is another one"
    if dataset.held_out and record.held_out != dataset.held_out:
        return (
            f"{dataset.held_out}: {folder} has recorded {record.held_out or 'no validation set'}, so its weights may have been "
            "trained on images that now validate them"
        )
    return None
