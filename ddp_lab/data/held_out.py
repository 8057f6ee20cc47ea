"""The validation set of a dataset that comes without one: a fraction of the training samples, which are then not trained on."""

import hashlib
import os
from dataclasses import replace

import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.samples import Dataset

DEFAULT = 0.1  # data.val_fraction=null, if there is nothing else to evaluate with


def hold_out(dataset: Dataset, fraction: float | None, seed: int) -> Dataset:
    """Return the dataset with a validation set of some training samples. It depends on the arguments alone.

    Args:
        dataset: with or without a validation set.
        fraction: of the training samples; 0: none; None: DEFAULT if the dataset has nothing to evaluate with, else none.
        seed: of the choice.

    Raises:
        ConfigError: the dataset has a validation set already, or no sample is left to train on or to evaluate with.
    """
    evaluates = dataset.val is not None or dataset.test is not None
    if fraction is None:
        fraction = 0 if evaluates else DEFAULT
    if not fraction and evaluates:
        return dataset
    key = f"data.val_fraction={fraction}"
    if dataset.val is not None:
        raise ConfigError(f"{key}: the dataset has a validation set already; use data.val_fraction=0, or remove its own")
    size, held_out = dataset.train.size, f"{key} data.val_seed={seed}"
    if dataset.names is None:
        held_out += f" of {size:,} samples"  # the choice depends on their number, too
        chosen = torch.zeros(size, dtype=torch.bool)
        chosen[torch.randperm(size, generator=torch.Generator().manual_seed(seed))[: round(fraction * size)]] = True
    else:
        chosen = torch.tensor([is_held_out(dataset.names(index), fraction, seed) for index in range(size)], dtype=torch.bool)
    training, evaluated = (~chosen).nonzero().flatten(), chosen.nonzero().flatten()
    if not len(training) or not len(evaluated):
        raise ConfigError(
            f"{key}: leaves {len(training)} of {size} samples to train on and {len(evaluated)} to evaluate with; both must be "
            "at least 1. Use another fraction, or add samples"
        )
    return replace(
        dataset,
        train=dataset.train.subset(training, augment=True),
        val=dataset.train.subset(evaluated, augment=False),
        names=None,
        held_out=held_out,
    )


def is_held_out(name: str, fraction: float, seed: int) -> bool:
    """Return whether a file is held out: by a hash of its name, so a file stays where it is when others come or go."""
    digest = hashlib.sha256(os.fsencode(f"{seed}/{name}")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64
