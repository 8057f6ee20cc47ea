"""Streams as users write them, which import nothing of ddp_lab."""

import itertools
import os
import random

import torch
from torch.utils.data import IterableDataset

SIZE = 40  # samples of a pass


def sample(index: int):
    """Return an image in uint8 and its class; both depend on the number alone."""
    generator = torch.Generator().manual_seed(index)
    label = index % 10
    image = torch.randint(0, 60, (1, 28, 28), generator=generator) + 19 * label
    return image.to(torch.uint8), label


class Evaluated:
    """A map-style set."""

    classes = tuple(map(str, range(10)))

    def __init__(self, size: int = 31):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return sample(1000 + index)


class Images(IterableDataset):
    """A stream of images, of which every part can be read by itself."""

    classes = Evaluated.classes

    def __init__(self, size: int = SIZE, part: int = 0, parts: int = 1):
        self.size = size
        self.part = part
        self.parts = parts

    def numbers(self):
        return range(self.part, self.size, self.parts)

    def shard(self, num, index):
        return type(self)(self.size, self.part + index * self.parts, self.parts * num)

    def __iter__(self):
        for number in self.numbers():
            yield self.read(number)

    def read(self, number):
        return sample(number)


class Noisy(Images):
    """Draws from the global generators, and orders each pass anew by its own buffer."""

    def __iter__(self):
        buffer = []
        for number in self.numbers():
            buffer.append(number)
            if len(buffer) > 5:
                yield self.read(buffer.pop(random.randrange(len(buffer))))
        yield from map(self.read, buffer)

    def read(self, number):
        image, label = sample(number)
        return image + torch.randint(0, 5, image.shape, dtype=torch.uint8), label


class Stateful(Images):
    """Knows where it is, and notes from which sample each iteration began."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.done = 0
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def numbers(self):
        numbers = [*super().numbers()]
        random.Random(self.epoch).shuffle(numbers)
        return numbers

    def __iter__(self):
        note(self.done)
        for number in self.numbers()[self.done :]:
            self.done += 1
            yield self.read(number)
        self.done = 0

    def state_dict(self):
        return {"done": self.done, "epoch": torch.tensor(self.epoch)}

    def load_state_dict(self, state):
        self.done = state["done"]
        self.epoch = int(state["epoch"])


class Losing(Stateful):
    """Loses a sample when it loads a state."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.done += 1


class Unsaved(Stateful):
    """Has a state that is not loaded from files of others."""

    def state_dict(self):
        return {**super().state_dict(), "generator": random.Random()}


def note(begin: int) -> None:
    """Append where an iteration begins to the file of the environment, if there is one."""
    path = os.environ.get("STREAM_NOTES")
    if path:
        with open(path, "a") as file:
            file.write(f"{begin}\n")


class ByRank(Images):
    """Divides itself among the ranks, which changes the order."""

    def numbers(self):
        rank = int(os.environ.get("RANK", "0"))
        return itertools.islice(super().numbers(), rank, None)


class Once(Images):
    """Returns the same iterator each time."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.samples = iter(super().__iter__())

    def __iter__(self):
        return self.samples


class Whole(IterableDataset):
    """Cannot be divided."""

    classes = Evaluated.classes

    def __iter__(self):
        return map(sample, range(SIZE))


class Failing(Images):
    """Has a sample that cannot be read."""

    def read(self, number):
        if number == 30:
            raise ValueError(f"file {number} is damaged")
        return super().read(number)


def with_sets(name: str, split: str, size: int = SIZE):
    """Return a stream to train on, and map-style sets to evaluate with."""
    return globals()[name](size) if split == "train" else Evaluated()


def images(split: str, size: int = SIZE):
    return with_sets("Images", split, size)


def noisy(split: str, size: int = SIZE):
    return with_sets("Noisy", split, size)


def stateful(split: str, size: int = SIZE):
    return with_sets("Stateful", split, size)


def losing(split: str):
    return with_sets("Losing", split)


def unsaved(split: str):
    return with_sets("Unsaved", split)


def by_rank(split: str):
    return with_sets("ByRank", split)


def once(split: str):
    return Once() if split == "train" else Evaluated()


def whole(split: str):
    return Whole() if split == "train" else Evaluated()


def failing(split: str):
    return with_sets("Failing", split)


def empty(split: str):
    return with_sets("Images", split, 0)


def ending(split: str):
    """Return streams, of which that to evaluate with ends."""
    return Images() if split == "train" else Ending()


class Ending(Images):
    """The samples of `Evaluated` as a stream."""

    def __iter__(self):
        yield from (Evaluated()[index] for index in range(31))


class OfImage(torch.nn.Module):
    """A model of samples that are dicts."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.layer = torch.nn.Linear(28 * 28, num_classes)

    def forward(self, image):
        return self.layer(image.flatten(1) / 255)


def hugging_face(split: str, size: int = SIZE, shards: int = 4, buffer: int = 0):
    """Return an IterableDataset of the package datasets, whose samples are dicts."""
    import datasets

    if split != "train":
        samples = map(Evaluated().__getitem__, range(9))
        return [{"image": image, "label": label} for image, label in samples]
    rows = {"label": [number % 10 for number in range(size)], "number": [*range(size)]}
    stream = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=shards)
    stream = stream.map(lambda row: {**row, "image": sample(row["number"])[0].numpy()})
    stream = stream.remove_columns("number").with_format("torch")
    return stream.shuffle(seed=3, buffer_size=buffer) if buffer else stream
