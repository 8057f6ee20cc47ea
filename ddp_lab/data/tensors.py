"""`data=tensors`: a map-style dataset of (input, target), tensors of any shape and dtype, as they are."""

from functools import partial
from typing import Any

import torch
from torch.utils.data import TensorDataset

from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.data.dataset import Dataset, Indexed, InMemory
from ddp_lab.data.sources import OwnSets


class Tensors(OwnSets):
    """A map-style dataset whose constructor has a parameter `split` or `train` (true, false).

    A torch TensorDataset is held in memory. The samples of others are read one by one.

    Args:
        node: the config group `data.dataset`.
        num_classes: number of classes of the targets, for models that name it; None: there are none.
        splits: value of the parameter `split` for each set of samples; None: there is no such set.
        seed: of the run.
    """

    def __init__(self, node: dict[str, Any], num_classes: int | None, splits: dict[str, str | None], seed: int):
        super().__init__(node, splits)
        self.num_classes, self.seed = num_classes, seed

    def load(self, prepared: str = "") -> Dataset:
        """Construct the training set, the validation set and the test set, and check the first sample of each."""
        sets = {name: samples_of(dataset, self.name, self.seed) for name, dataset in self.sets().items()}
        classes = [str(label) for label in range(self.num_classes or 0)]
        return Dataset(sets["train"], sets.get("test"), classes, sets.get("val"))


def samples_of(dataset: Any, name: str = "the dataset", seed: int = 0) -> InMemory | Indexed:
    """Return the samples of a map-style dataset of (input, target), and check the first one.

    Args:
        dataset: has `__len__` and `__getitem__`; a torch TensorDataset of two tensors is used without a copy.
        name: begins messages.
        seed: of the run, which determines what the dataset draws at random.

    Raises:
        ConfigError: it is not map-style, is empty, or its first sample is not a pair of tensors or numbers.
    """
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return InMemory(*dataset.tensors)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and len(dataset)):
        raise ConfigError(f"{name}: must be a map-style dataset, with __len__, __getitem__ and at least one sample")
    samples = Indexed(partial(read, dataset, name), torch.arange(len(dataset)), seed)
    _ = samples.first
    return samples


def read(dataset: Any, name: str, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sample of a map-style dataset as tensors.

    Raises:
        ConfigError: it cannot be read, or is not a pair of tensors or numbers.
    """
    try:
        item = dataset[number]
    except MemoryError:
        raise
    except Exception as error:
        raise ConfigError(f"{name}: sample {number} cannot be read: {describe_error(error)}") from None
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise ConfigError(f"{name}: sample {number} must be (input, target), got {type(item).__name__}")
    try:
        return torch.as_tensor(item[0]), torch.as_tensor(item[1])
    except (TypeError, ValueError, RuntimeError) as error:
        kinds = " and ".join(type(each).__name__ for each in item)
        raise ConfigError(f"{name}: sample {number} must be tensors, arrays or numbers, got {kinds} ({error})") from None
