"""Mixup and CutMix: the same mixed batches for any world size, and what is drawn."""

import pytest
import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.augment import Mix, draw_mix
from ddp_lab.data.batch import Batch

BATCH, SIZE, CLASSES = 24, 8, 5
INPUTS = torch.randn(BATCH, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(0, CLASSES, (BATCH,), generator=torch.Generator().manual_seed(1))


def mix(mixup: float, cutmix: float, dp_size: int = 1) -> Mix:
    shape = {"batch_size": BATCH, "image_size": SIZE, "num_classes": CLASSES}
    return Mix(mixup, cutmix, dp_size=dp_size, seed=3, **shape)


def by_hand(step: int, mixup: float, cutmix: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mixed images and targets, computed sample by sample."""
    own, weight, top, bottom, left, right = draw_mix(mixup, cutmix, SIZE, 3, step)
    images, targets = INPUTS.clone(), torch.zeros(BATCH, CLASSES)
    for i in range(BATCH):
        partner = (i + BATCH // 2) % BATCH
        rectangle = slice(top, bottom), slice(left, right)
        images[i][:, *rectangle] = (1 - weight) * INPUTS[i][:, *rectangle] + weight * INPUTS[partner][:, *rectangle]
        targets[i, TARGETS[i]] += own
        targets[i, TARGETS[partner]] += 1 - own
    return images, targets


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0), (0, 1.0), (0.4, 1.0)])
def test_each_sample_is_mixed_with_the_one_half_a_batch_away_for_any_world_size(mixup, cutmix):
    for dp_size in (1, 2, 3, 4, 6, 12):
        mixer = mix(mixup, cutmix, dp_size)
        for step in range(8):
            images, targets = by_hand(step, mixup, cutmix)
            mixer.prepare(step)
            for rank in range(dp_size):
                batch = mixer(Batch(INPUTS[rank::dp_size], TARGETS[rank::dp_size], BATCH))
                torch.testing.assert_close(batch.inputs, images[rank::dp_size])
                torch.testing.assert_close(batch.targets, targets[rank::dp_size])


def test_partial_last_batch_stays_unmixed_and_local_batches_of_odd_size_are_refused():
    batch, mixer = Batch(INPUTS[:7], TARGETS[:7], 7), mix(1.0, 0)
    mixer.prepare(0)
    assert mixer(batch) is batch
    message = "mixup=0.4, cutmix=0: mix the samples of a local batch in pairs, but a global batch of 24 has local batches of 3"
    with pytest.raises(ConfigError, match=f"{message}; use a global batch of 16 or 32, or mixup=0 cutmix=0"):
        mix(0.4, 0, dp_size=8)
