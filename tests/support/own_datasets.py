"""Map-style datasets as users write them, which import nothing of ddp_lab."""

import random
import time

import numpy as np
import torch
from PIL import Image


class Shapes:
    """PIL images of different sizes, drawn with the generators that users draw from."""

    classes = ("dark", "light", "red")

    def __init__(self, split, size: int = 20):
        self.split = split
        self.size = size

    def __len__(self):
        return self.size if self.split == "train" else 7

    def __getitem__(self, index):
        pixels = np.full((30 + index, 40, 3), (80 * (index % 3), 90, 7), dtype=np.uint8)
        noise = (
            np.random.randint(0, 50, pixels.shape)
            + random.randint(0, 9)
            + torch.randint(0, 9, ()).item()
        )
        return Image.fromarray((pixels + noise).astype(np.uint8)), index % 3


class Slow(Shapes):
    """Shapes that take a second to open, and a tenth of a second each to read."""

    def __init__(self, split):
        time.sleep(1 if split == "train" else 0)
        super().__init__(split)

    def __getitem__(self, index):
        time.sleep(0.1 if self.split == "train" else 0)
        return super().__getitem__(index)


class Costly(Shapes):
    """Shapes of which each takes five milliseconds to read, as a picture of a camera."""

    def __getitem__(self, index):
        time.sleep(0.005)
        return super().__getitem__(index)


class Tested(Shapes):
    """A dataset without a split val."""

    def __init__(self, split):
        if split not in ("train", "test"):
            raise ValueError(split)
        super().__init__(split)


class Tensors:
    """Tensors of a dataset that is called with train=, and has no `classes`."""

    def __init__(self, train, label: int = 0):
        self.label = label

    def __len__(self):
        return 6

    def __getitem__(self, index):
        image = torch.arange(3 * 24 * 24).reshape(3, 24, 24).add(index).remainder(256)
        return image.to(torch.uint8), torch.tensor(index % 2 + self.label)


class Workers(Tensors):
    """Images that are as bright as there are worker processes."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        workers = torch.utils.data.get_worker_info()
        return torch.full_like(image, 40 * (workers.num_workers if workers else 0)), label


class Wrong(Shapes):
    """Samples that cannot be used, for the reason `how`."""

    def __init__(self, split, how):
        if how == "constructor":
            raise OSError("no images")
        self.how = how
        super().__init__(split, 0 if how == "empty" else 20)

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        if self.how == "sample":
            raise KeyError(index)
        outline = torch.zeros(image.height, image.width)
        return {"alone": image, "word": (image, "cat"), "outline": (image, outline)}.get(
            self.how, (image, label + 5 * (index == 4))
        )


class Tokens(torch.utils.data.TensorDataset):
    """One set of tokens, each with the next of every position; later samples ignore more."""

    def __init__(self, ignored: bool = False):
        tokens = torch.arange(40 * 9).view(40, 9) % 11
        targets = tokens[:, 1:].clone()
        if ignored:
            targets[torch.arange(8) < torch.arange(40)[:, None] % 7] = -100
        super().__init__(tokens[:, :-1], targets)


class Masks(torch.utils.data.Dataset):
    """Images in uint8 and masks with a first row to be ignored, and more by index."""

    def __init__(self, split):
        self.size = 37 if split == "train" else 11

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        mask = (torch.rand(8, 8, generator=generator) > 0.5).to(torch.uint8)
        image = 120 * mask + torch.randint(
            0, 100, (3, 8, 8), generator=generator, dtype=torch.uint8
        )
        mask[: 1 + index % 7] = 255
        return image, mask


def numbers(split):
    """Return a dataset in memory: six numbers, and their sum and their largest one."""
    inputs = torch.randn(
        40 if split == "train" else 12, 6, generator=torch.Generator().manual_seed(len(split))
    )
    return torch.utils.data.TensorDataset(inputs, torch.stack([inputs.sum(1), inputs.amax(1)], 1))


def signs(split):
    """Return the same with two labels: whether the sum and the largest number are large."""
    inputs, targets = numbers(split).tensors
    return torch.utils.data.TensorDataset(inputs, (targets > torch.tensor([0.0, 1.2])).long())


class Sized:
    """A dataset whose number of samples is an argument."""

    def __init__(self, size: int = 40):
        self.size = size

    def __len__(self):
        return self.size


class Pairs(Sized):
    """Samples with a dict of two inputs, for models whose forward has their names."""

    classes = ("below", "above")

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        left, right = torch.rand(2, 3, generator=generator)
        return {"left": left, "right": right}, int(left.sum() > right.sum())


class Texts(Sized):
    """Samples that are dicts, of different lengths, with a part that is no number."""

    classes = ("even", "odd")

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, 11, (2 + index % 5,), generator=generator)
        return {"ids": ids, "label": int(ids.sum()) % 2, "text": "some"}


def pad(samples):
    """Return the batch of some of these texts, padded to the longest one."""
    return Pad(1)(samples)


class Pad:
    """Pads to multiples of a length."""

    def __init__(self, multiple: int):
        self.multiple = multiple

    def __call__(self, samples):
        ids = [sample["ids"] for sample in samples]
        ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        ids = torch.nn.functional.pad(ids, (0, -ids.shape[1] % self.multiple))
        labels = torch.tensor([sample["label"] for sample in samples])
        return {"ids": ids, "mask": (ids > 0).float(), "label": labels}


def unlabelled(samples):
    """Return the batch without labels."""
    batch = pad(samples)
    return {"ids": batch["ids"], "mask": batch["mask"]}


def pad_ids(samples):
    """Return the batch of texts as a tensor and the labels."""
    batch = pad(samples)
    return batch["ids"], batch["label"]


class NoFunction:
    """Has no __call__."""


class Loaded:
    """A source, with the method load."""

    def load(self):
        raise NotImplementedError


class Points(Sized):
    """Samples of three parts: two inputs with the target between them."""

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        left, right = torch.rand(2, 3, generator=generator)
        return left, (left * right)[:2], right
