"""Samples that a user's function makes a batch of, for example by padding to the longest one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ddp_lab.config.errors import ConfigError, SampleError, count, describe_error
from ddp_lab.data.dataset import Samples
from ddp_lab.data.parts import TargetKey, as_tree, divide
from ddp_lab.data.seeds import seeded
from ddp_lab.data.trees import Tree, require_one_size, rows


@dataclass(frozen=True)
class Collated(Samples):
    """Samples of any form, of which `collate_fn` makes batches.

    Attributes:
        dataset: map-style, of the user.
        collate_fn: returns the batch of a list of samples.
        targets: place of the targets in a batch, as in `parts.divide`.
        numbers: int64 [N], the samples, in order.
        seed: of the run, by which what the dataset and `collate_fn` draw is seeded.
        name: begins messages.
        key: name of the argument that is `targets`, for messages.
    """

    dataset: Any
    collate_fn: Callable[[list[Any]], Any]
    targets: TargetKey
    numbers: torch.Tensor
    seed: int
    name: str
    key: str = "targets"

    @property
    def size(self) -> int:
        return len(self.numbers)

    @property
    def has_fixed_shapes(self) -> bool:
        return False

    @cached_property
    def first(self) -> tuple[Tree, Tree]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.sample(0, 0)

    def sample(self, epoch: int, index: int) -> tuple[Tree, Tree]:
        inputs, targets = self.batch(epoch, [index])
        return rows((inputs, targets), torch.tensor(0))

    def number(self, index: int) -> int:
        return int(self.numbers[index])

    def subset(self, indices: torch.Tensor, augment: bool) -> "Collated":
        return replace(self, numbers=self.numbers[indices])

    def batch(self, epoch: int, indices: Sequence[int]) -> tuple[Tree, Tree]:
        """Return inputs and targets of some samples; a function of seed, epoch and indices.

        Raises:
            ConfigError: a sample cannot be read, or `collate_fn` fails or returns no batch of these
                samples.
        """
        samples: list[Any] = []
        for index in indices:
            with seeded("sample", seed=self.seed, epoch=epoch, index=index):
                samples.append(self._read(self.number(index)))
        with seeded("collate", seed=self.seed, epoch=epoch, index=indices[0]):
            return collate(samples, self.collate_fn, self.targets, self.name, self.key)

    def _read(self, number: int) -> Any:
        try:
            return self.dataset[number]
        except (MemoryError, SampleError):
            raise
        except Exception as error:
            raise ConfigError(
                f"{self.name}: sample {number} cannot be read: {describe_error(error)}"
            ) from None


def collate(
    samples: list[Any],
    collate_fn: Callable[[list[Any]], Any],
    targets: TargetKey,
    name: str,
    key: str = "targets",
) -> tuple[Tree, Tree]:
    """Return inputs and targets of the batch that a function of the user makes of some samples.

    Args:
        samples: of the user's dataset.
        collate_fn, targets, name, key: as in `Collated`.

    Raises:
        ConfigError: the function fails or returns no batch of these samples.
    """
    try:
        user_batch = collate_fn(samples)
    except MemoryError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name}: collate_fn failed for {count(len(samples), 'sample')}: "
            f"{describe_error(error)}"
        ) from None
    inputs, expected = divide(user_batch, targets, f"{name}: the batch from collate_fn", key)
    try:
        batch = as_tree(inputs, "inputs"), as_tree(expected, "targets")
    except (ConfigError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{name}: the batch from collate_fn must be tensors, or tuples or dicts of them: "
            f"{error}"
        ) from None

    size = require_one_size(f"{name}: the batch from collate_fn", inputs=batch[0], targets=batch[1])
    if size != len(samples):
        raise ConfigError(
            f"{name}: collate_fn must return a batch of the {count(len(samples), 'sample')} that "
            "it got, "
            f"got {size}"
        )
    return batch
