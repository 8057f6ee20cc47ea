"""`data=hf`: a dataset of the package `datasets`, from disk: images with classes, or text.

It becomes a dataset that `data=own` takes.
"""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from ddp_lab.config.errors import ConfigError
from ddp_lab.config.packages import import_package
from ddp_lab.config.types import Count
from ddp_lab.data.datasets import BYTES, cut


class Labelled:
    """The rows of a split as (input, target).

    Attributes:
        classes: the names of the classes; none if the target is not a class.
    """

    def __init__(self, rows: Any, inputs: str, targets: str):
        self.rows = rows
        self.inputs = inputs
        self.targets = targets
        self.classes: list[str] = getattr(rows.features[targets], "names", [])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        row = self.rows[number]
        return row[self.inputs], row[self.targets]


class Tokens(TensorDataset):
    """The bytes of a text as tokens, and the next tokens: both uint8 [samples, context]."""

    classes = range(BYTES)


def open_split(
    split: str, root: str, inputs: str, targets: str | None, context: Count
) -> Labelled | Tokens:
    """Return a split of a dataset on this machine.

    Args:
        split: its name.
        root: directory that `save_to_disk` wrote, or one of which `load_dataset` finds the format:
            images in folders, Parquet, JSON, CSV or text.
        inputs: the column of images, or of text.
        targets: the column of classes; null: the bytes of all texts, with a line break after each,
            are tokens for task=tokens.
        context: tokens of a sample.

    Raises:
        ConfigError: the package is missing, there is no such directory or column, or the text is
            too short.
    """
    datasets = import_package("datasets", "hf", "data=hf")

    folder = Path(root)
    key = f"data.root={root}"
    if not folder.is_dir():  # load_dataset would look for it on the Hub
        raise ConfigError(
            f"{key}: is not a directory on this machine. Download the dataset, and use its "
            "directory"
        )

    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        saved = datasets.load_from_disk(root)
        splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    else:
        splits = datasets.load_dataset(str(folder.resolve()))
    if split not in splits:
        raise ConfigError(
            f"{key}: has no split {split}; it has {', '.join(map(str, splits))}. data.val_split "
            "and data.test_split name two"
        )

    rows = splits[split]
    for name, column in {"inputs": inputs, "targets": targets}.items():
        if column is not None and column not in rows.column_names:
            raise ConfigError(
                f"data.dataset.{name}={column}: there is no such column; {root} has "
                f"{', '.join(rows.column_names)}"
            )
        if column is not None and targets is not None and is_text(rows, column):
            if name == "inputs":
                remedy = "use data.dataset.targets=null task=tokens for a model of text"
            else:
                remedy = (
                    f"make it classes with dataset.class_encode_column('{column}') of the package "
                    "datasets, and save_to_disk"
                )
            raise ConfigError(f"data.dataset.{name}={column}: is text; {remedy}")

    if targets is None:
        return tokens_of(rows, inputs, context, root)
    return Labelled(rows, inputs, targets)


def is_text(rows: Any, column: str) -> bool:
    return getattr(rows.features[column], "dtype", "") in ("string", "large_string")


def tokens_of(rows: Any, column: str, context: int, root: str) -> Tokens:
    """Return the texts in a column as tokens. The arguments are as in `open_split`."""
    if not is_text(rows, column):
        raise ConfigError(
            f"data.dataset.inputs={column}: is not text. Name its classes with "
            "data.dataset.targets=COLUMN"
        )
    text = bytearray("".join(f"{row}\n" for row in rows[column] if row is not None), "utf-8")
    return Tokens(
        *cut(torch.frombuffer(text, dtype=torch.uint8), context, f"{root}, column {column}")
    )
