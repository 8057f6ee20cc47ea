"""Two loaders of the same batches: gathered by the device from a dataset that lives there, or by worker processes."""

import signal
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, TensorDataset

from ddp_lab.data.augment import augment
from ddp_lab.data.datasets import LabelledImages
from ddp_lab.data.sharding import IGNORE, Loader


class DeviceLoader(Loader):
    """The whole dataset lives on the device as uint8; a batch is an index into it. No workers, no copies."""

    def __init__(self, data: LabelledImages, batch_size: int, *, device: torch.device, num_workers: int, **share):
        super().__init__(data, batch_size, device=device, **share)
        self.images, self.targets = data.images.to(device), data.targets.to(device)
        # For `take`: the epoch's order, its targets and moves, where graphs expect them, and how far the epoch is.
        self._order = torch.zeros(self.sampler.num_samples, dtype=torch.int64, device=device)
        self._wanted = torch.zeros_like(self._order)
        self._moves = self._order.new_zeros(3, len(self._order)) if self.shift or self.flip else None
        self._places = torch.arange(self.local_batch_size, device=device)
        self._first = torch.zeros((), dtype=torch.int64, device=device)
        self._ahead: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # by epoch
        self._gather = self._gather_eagerly

    def _raw_batches(self):
        indices = self.sampler.indices()
        if not len(indices):
            return
        for index in indices.to(self.device).split(self.local_batch_size):
            yield self.images[index], self.targets[index]

    def deal(self) -> None:
        """Puts what is left of the epoch where `take` finds it."""
        epoch, start = self.sampler.epoch, self.sampler.start
        order, moves = self._ahead.get(epoch) or self._draw(epoch)
        self._order[start:] = order[start:].to(self.device)
        self._wanted[start:] = self.targets[self._order[start:]]
        self._wanted[self.real :] = IGNORE
        if moves is not None:
            self._moves[:, start:] = moves[:, start:].to(self.device)
        self._first.fill_(start)

    def look_ahead(self) -> None:
        """Draws the next epoch's order and moves while the device is still busy with this one's batches. A permutation of
        240,000 takes the host 3 to 8 ms, in which LeNet trains on 10,000 to 20,000 samples on four GPUs."""
        self._ahead = {self.sampler.epoch + 1: self._draw(self.sampler.epoch + 1)}

    def _draw(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.sampler.own(epoch), self._own_moves(epoch)

    def compile(self, fuse: Callable) -> None:
        """Fuse the kernels of `take` by `fuse`, a torch.compile."""
        self._gather = fuse(self._gather_eagerly)

    def take(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch's inputs and targets. Nothing of it is decided on the host, so that a CUDA graph can hold it."""
        return self._gather(size)

    def _gather_eagerly(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        places = self._places[:size] + self._first
        self._first += size
        images = self.images[self._order[places]]
        if self._moves is not None:  # never changes: a graph holds either way
            images = augment(images, *self._moves[:, places])
        return self.normalise(images), self._wanted[places]


def ignore_signals(worker: int) -> None:
    """The main process decides what a signal means that a scheduler or a terminal sends to all of a launch."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class WorkerLoader(Loader):
    """The textbooks' way: worker processes gather batches in host memory; pinned, they are copied while the device computes."""

    def __init__(self, data: LabelledImages, batch_size: int, *, device: torch.device, num_workers: int, **share):
        super().__init__(data, batch_size, device=device, **share)
        self.loader = DataLoader(
            TensorDataset(*data),
            batch_size=self.local_batch_size,
            sampler=self.sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            worker_init_fn=ignore_signals,
            pin_memory=device.type == "cuda",
        )

    def _raw_batches(self):
        for images, targets in self.loader:
            yield images.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)


LOADERS = {"device": DeviceLoader, "workers": WorkerLoader}
