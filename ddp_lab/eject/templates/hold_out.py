"""data.val_fraction"""

import torch
from settings import VAL_FRACTION, VAL_SEED
from torch import Tensor


def hold_out(sets: dict[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the sets with a validation set of some training samples."""
    inputs, targets = sets.pop("train")
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(VAL_SEED))
    chosen = order.argsort() < round(VAL_FRACTION * len(inputs))
    parts = {"train": ~chosen, "val": chosen}
    return {name: (inputs[part], targets[part]) for name, part in parts.items()} | sets
