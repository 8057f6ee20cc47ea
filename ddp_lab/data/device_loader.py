"""The loader of samples that are on the device, all of them."""

from collections.abc import Callable, Iterator
from typing import Unpack

import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.augment import augment
from ddp_lab.data.batch import IGNORE
from ddp_lab.data.loader import Loader, LoaderOptions
from ddp_lab.data.samples import LabelledImages, Samples

Gather = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


class DeviceLoader(Loader):
    """Loader that keeps the whole dataset on the device as uint8 and gathers each batch there: no workers, no host copies.

    Args:
        data: LabelledImages.
        num_workers: ignored; accepted so that both loaders take the same arguments.

    Raises:
        ConfigError: the images are not in memory.
    """

    def __init__(
        self,
        data: Samples,
        batch_size: int,
        *,
        device: torch.device,
        num_workers: int,
        **options: Unpack[LoaderOptions],
    ):
        if not isinstance(data, LabelledImages):
            raise ConfigError(
                "data.loader=device: is not supported by images that are read one by one; use data.loader=workers"
            )
        super().__init__(data, batch_size, device=device, **options)
        self.images, self.targets = data.images.to(device), data.targets.to(device)
        # The buffers that `take` reads; a CUDA graph captures their addresses. They hold the epoch's order, targets and shifts
        # and flips ("moves"), and the position in the epoch.
        self._order = torch.zeros(self.sampler.num_samples, dtype=torch.int64, device=device)
        self._wanted = torch.zeros_like(self._order)
        self._moves = self._order.new_zeros(3, len(self._order)) if self.crop_padding or self.flip else None
        self._places = torch.arange(self.local_batch_size, device=device)
        self._first = torch.zeros((), dtype=torch.int64, device=device)
        self._ahead: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # drawn by `look_ahead`, by epoch
        self._gather: Gather = self._gather_eagerly

    def _raw_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        indices = self.sampler.indices()
        if not len(indices):
            return
        for index in indices.to(self.device).split(self.local_batch_size):
            # On a CPU ten times as fast as images[index]: 3 us in place of 32 for 64 images of 28 x 28.
            yield self.images.index_select(0, index), self.targets.index_select(0, index)

    def deal(self) -> None:
        """Write the order, targets and moves of the rest of the epoch into the buffers that `take` reads."""
        epoch, start = self.sampler.epoch, self.sampler.start
        self._ahead = {epoch: self._ahead.get(epoch) or self._draw(epoch)}  # kept: the warm-up of a graph deals often
        order, moves = self._ahead[epoch]
        self._order[start:] = order[start:].to(self.device)
        self._wanted[start:] = self.targets[self._order[start:]]
        self._wanted[self.real :] = IGNORE
        if self._moves is not None and moves is not None:
            self._moves[:, start:] = moves[:, start:].to(self.device)
        self._first.fill_(start)

    def look_ahead(self) -> None:
        """Draw the next epoch's order and moves while the device still computes this epoch's batches.

        A permutation of 240,000 samples takes the host 3 to 8 ms. In that time LeNet trains on 10,000 to 20,000 samples on
        four GPUs.
        """
        self._ahead = {self.sampler.epoch + 1: self._draw(self.sampler.epoch + 1)}

    def _draw(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.sampler.own(epoch), self._own_moves(epoch)

    def compile(self, fuse: Callable[[Gather], Gather]) -> None:
        """Compile `take` with `fuse`, which is torch.compile with its options, to fuse its kernels."""
        self._gather = fuse(self._gather_eagerly)

    def take(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of the next batch.

        Call `deal` before the first batch of an epoch. Nothing is decided on the host, so a CUDA graph can capture it.

        Args:
            size: samples in this rank's local batch, from `turns`.

        Returns:
            float32 [size, channels, height, width] and int64 [size], with IGNORE for padding.
        """
        return self._gather(size)

    def _gather_eagerly(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        places = self._places[:size] + self._first
        self._first += size
        images = self.images[self._order[places]]
        if self._moves is not None:  # the same for the loader's whole life, so a captured graph remains correct
            images = augment(images, *self._moves[:, places])
        return self.normalise(images), self._wanted[places]
