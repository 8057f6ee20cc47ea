"""A small dataset of the package `datasets` for tests: images, classes, numbers and texts."""

from pathlib import Path

from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from own_datasets import Shapes

FEATURES = {
    "image": Image(),
    "label": ClassLabel(names=list(Shapes.classes)),
    "number": Value("int64"),
    "text": Value("string"),
}


def make_hf() -> DatasetDict:
    def split(size: int) -> Dataset:
        samples = [Shapes("train")[index] for index in range(size)]
        columns = {
            "image": [image for image, _ in samples],
            "label": [label for _, label in samples],
        }
        columns |= {"number": [index % 6 for index in range(size)], "text": ["to be or not"] * size}
        return Dataset.from_dict(columns, features=Features(FEATURES))

    return DatasetDict(train=split(20), test=split(8))


def write_hf(folder: Path) -> None:
    make_hf().save_to_disk(folder)
