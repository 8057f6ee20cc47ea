"""The schema of the group `data`."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ddp_lab.config.types import Allowed, Count, Fraction, Group, NaturalNumber, Positive, Probability


class Keys(BaseModel):
    """A set of keys; other keys are rejected. An integer is accepted as a float; a bool or a string is not."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, arbitrary_types_allowed=True, defer_build=True)


class DataConfig(Keys):
    """The keys of the group `data`."""

    root: str = Field(
        description="Directory of torchvision's datasets, where missing ones are downloaded to, or of the images (data=folder)."
    )
    loader: Literal["auto", "device", "workers"] = Field(
        description="Where batches are made: on the device, which holds the whole dataset (device), or in DataLoader processes "
        "(workers); auto: on the device, if speed=auto finds enough memory on a GPU, and always without that."
    )
    num_workers: NaturalNumber = Field(description="Number of DataLoader processes of each rank (loader=workers).")
    crop_padding: NaturalNumber = Field(
        description="Random-crop padding: pixels of zeros on each side of a training image, of which a random crop is taken."
    )
    flip: bool = Field(description="Whether each training image is mirrored left to right with probability 1/2.")
    val_fraction: Fraction | None = Field(
        0.0,
        description="Fraction of the training samples to hold out as the validation set, by index or, for files, by a hash of "
        "the name, so that it is about this fraction; null: 0.1 if there are neither validation nor test samples, else 0.",
    )
    val_seed: NaturalNumber = Field(0, description="Seed of the choice of these samples.")
    channels: Literal[1, 3] = Field(3, description="3: images are converted to RGB; 1: to grey.")
    image_size: Count = Field(224, description="Height and width of a sample, in pixels.")
    resize: Count | None = Field(
        None, description="Length to which the shorter side of every image is resized before any crop; null: 8/7 of image_size."
    )
    crop_scale: list[Positive] | None = Field(
        None,
        description="Smallest and largest area of RandomResizedCrop, as fractions of the image; null: the centre of the image.",
    )
    randaugment: Annotated[int, Field(ge=0, le=30), Allowed("an integer from 0 to 30")] | None = Field(
        None, description="Magnitude of RandAugment's two random operations; null: none."
    )
    erasing: Probability = Field(0.0, description="Probability with which a random rectangle gets the mean colour.")
    on_corrupt: Literal["stop", "skip"] = Field(
        "stop",
        description="What to do about files that cannot be decoded: name them and stop before training, or leave them out "
        "(skip).",
    )
    cache: Literal["none", "ram", "disk"] = Field(
        "none",
        description="Where decoded, resized images are kept, once for each machine: in shared memory (ram) until the launch "
        "ends, or in cache_dir (disk).",
    )
    cache_dir: str | None = Field(
        None, description="Directory of the cache; null: root/.cache or, if root is not writable, ~/.cache/ddp_lab."
    )
    num_classes: Count | None = Field(None, description="Number of classes; null: that of the dataset's attribute classes.")
    val_split: str | None = Field(
        "val",
        description="Name of the validation set, for a dataset whose constructor has a parameter split; null: there is none.",
    )
    test_split: str | None = Field(None, description="Name of the test set, as val_split.")
    dataset: Group = Field(description="Constructor of the dataset, with its options.")
    mean: list[float] = Field(description="Mean of each channel, subtracted from pixels in [0, 1].")
    std: list[Positive] = Field(description="Standard deviation of each channel, by which pixels are then divided.")
