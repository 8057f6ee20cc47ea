"""Mixup and CutMix: the same mixed batches for any world size, and what is drawn."""

import pytest
import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.augment import Mix
from ddp_lab.data.batch import Batch

BATCH, SIZE, CLASSES = 24, 8, 5
INPUTS = torch.randn(BATCH, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(0, CLASSES, (BATCH,), generator=torch.Generator().manual_seed(1))


def mix(mixup: float, cutmix: float, dp_size: int = 1) -> Mix:
    shape = {"batch_size": BATCH, "image_size": SIZE, "num_classes": CLASSES}
    return Mix(mixup, cutmix, dp_size=dp_size, seed=3, **shape)


def test_partial_last_batch_stays_unmixed_and_local_batches_of_odd_size_are_refused():
    batch, mixer = Batch(INPUTS[:7], TARGETS[:7], 7), mix(1.0, 0)
    mixer.prepare(0)
    assert mixer(batch) is batch
    message = "mixup=0.4, cutmix=0: mix the samples of a local batch in pairs, but a global batch of 24 has local batches of 3"
    with pytest.raises(ConfigError, match=f"{message}; use a global batch of 16 or 32, or mixup=0 cutmix=0"):
        mix(0.4, 0, dp_size=8)
