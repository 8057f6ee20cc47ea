"""Extension points of the training loop: what `fit` calls between steps and epochs."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ddp_lab.training.progress import Progress


class Hooks:
    """Hooks that do nothing. `resilience.guard.Guard` overrides them to save checkpoints, compare replicas and stop the run.

    Every method is called on all ranks at the same point.
    """

    def batches(self, doing: str, loader: Iterable[Any], progress: Progress) -> Iterator[Any]:
        """Yield the batches of `loader`. `doing` is "training" or "evaluating", for messages."""
        yield from loader

    def after_step(self, progress: Progress, here: Callable[[], Progress]) -> None:
        """Run after every step.

        Args:
            progress: its `sums` and `seconds` are still those from before this launch's steps of the epoch.
            here: returns the position with up-to-date `sums` and `seconds`. Collective; waits for the device.
        """

    def check(self, progress: Progress) -> None:
        """Run after the last step of an epoch, before its evaluation."""

    def evaluating(self, loader: Iterable[Any], progress: Progress) -> Iterator[Any]:
        """Yield the batches of an evaluation."""
        yield from self.batches("evaluating", loader, progress)

    def end_epoch(self, progress: Progress, last: bool) -> None:
        """Run after an evaluation, with `progress` at the beginning of the next epoch."""
