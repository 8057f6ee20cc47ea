"""Validation images that are held out of training get none of its random transforms."""

import pytest
import torch
from configs import config
from image_folders import write_folder

from ddp_lab.data.dataset import Dataset
from ddp_lab.run.build_data import load_dataset
from ddp_lab.world.runtime import Runtime

AUGMENTED = ["data.crop_scale=[0.2,0.5]", "data.randaugment=9", "data.erasing=0.9"]
SIZES = ["data.image_size=24", "data.resize=28"]


def loaded(*overrides: str) -> Dataset:
    return load_dataset(config(*overrides, *SIZES, "seed=5"), Runtime("cpu"))


def sources(folder) -> dict[str, list[str]]:
    root = write_folder(folder, {"train": 12})
    return {
        "folder": ["data=folder", f"data.root={root}"],
        "own": ["data=own", "data.dataset._target_=own_datasets.Tested", "data.val_split=null"],
    }


@pytest.mark.parametrize("kind", ["folder", "own"])
def test_held_out_images_are_those_of_a_dataset_without_augmentation(kind, tmp_path):
    overrides = [*sources(tmp_path)[kind], "data.val_fraction=0.5"]
    plain = [*overrides, "data.crop_scale=null", "data.randaugment=null", "data.erasing=0"]
    augmented = loaded(*overrides, *AUGMENTED)
    expected = loaded(*plain)
    assert augmented.val.size == expected.val.size > 0
    for index in range(augmented.val.size):
        for epoch in (0, 3):  # of which the dataset's own random numbers depend
            image, target = expected.val.sample(epoch, index)
            validation_image, label = augmented.val.sample(epoch, index)
            assert torch.equal(validation_image, image)
            assert label == target
    first, second = (augmented.train.sample(epoch, 0)[0] for epoch in (0, 3))
    assert not torch.equal(first, second), "the training images are not augmented"
