"""Where a trainer of a Lab is: epoch, samples and step, in a loop of the user's and in `fit`.

A loop counts epochs from 0, and checkpoints and the log from 1. The order of the samples of an
epoch has the number by which the run has begun to count, whichever of them trains the epoch.
"""

from dataclasses import replace

from ddp_lab.data.loader import Loader
from ddp_lab.lab.local_batches import CurrentBatch
from ddp_lab.training.progress import Progress
from ddp_lab.training.stream_position import check_resumed
from ddp_lab.world.runtime import Runtime


class LoopPosition:
    """The position of a trainer.

    Attributes:
        progress: the position as checkpoints and the log have it, with the epoch counted from 1.
        is_resumed: whether it is that of a checkpoint, from which nothing has continued yet.
    """

    def __init__(self) -> None:
        self.progress = Progress(first_order=0)
        self.is_resumed = False
        self._stream: Loader | None = None  # of the last loop, if it was on a stream

    @property
    def from_0(self) -> Progress:
        """The position, with the epoch counted from 0."""
        # a loop of an older version has not saved it so
        counts_from_1 = self.progress.first_order is not None
        return replace(self.progress, epoch=self.progress.epoch - counts_from_1)

    def resume(self, progress: Progress) -> None:
        """Take the position of a checkpoint; without a step there was none."""
        self.progress = progress if progress.step else Progress(first_order=0)
        self.is_resumed = True

    def begin_stream(self, loader: Loader, resumes: bool) -> None:
        """Let the readers of a stream begin where a checkpoint was, or at the beginning.

        Raises:
            ConfigError: the checkpoint is in another order of samples.
        """
        if resumes:
            check_resumed(self.progress, loader.data.readers)
        loader.begin_at(self.progress.stream if resumes else {})
        self._stream = loader if loader.data.is_endless else None

    def with_stream(self, runtime: Runtime) -> Progress:
        """Return the position with that of the readers of a stream, if there is one. Collective."""
        if self._stream is None:
            return self.progress
        return replace(self.progress, stream=self._stream.stream_position(runtime))

    def resumes_in(self, order: int) -> bool:
        """Return whether the checkpoint was in the epoch of an order."""
        return self.is_resumed and order == self.progress.order

    def count_step(self, current: CurrentBatch | None) -> None:
        """Move the position after a step.

        Args:
            current: batch of the loop that was trained on; None: another one.
        """
        self.progress.step += 1
        if current:
            self.progress.epoch += self.epochs_ahead(current)
            self.progress.samples = current.samples

    def epochs_ahead(self, current: CurrentBatch | None) -> int:
        """Return how many epochs a batch is ahead of the position."""
        return current.order - self.progress.order if current else 0

    def end_epoch(self, order: int, size: int) -> None:
        """Move to the next epoch, if all samples of this one were trained on.

        Args:
            order: number of the order of the epoch that has ended.
            size: its samples.
        """
        if self.progress.order == order and self.progress.samples == size:
            self.progress = self.progress.next_epoch()

    def first_order(self, new: int) -> int:
        """Return the number of the order of the first epoch, after `progress` has it, too.

        Args:
            new: that of a run which begins now: 0 in a loop, and 1 in `fit`. A checkpoint of an
                older version numbers its epochs as the orders, from here, too.
        """
        progress = self.progress
        if not progress.step:
            self.progress = Progress(first_order=new)
        elif progress.first_order is None:
            self.progress = replace(progress, epoch=progress.epoch + 1 - new, first_order=new)
        return self.progress.order - self.progress.epoch + 1
