"""Where others take part in the loop: what `fit` calls at its boundaries."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ddp_lab.training.progress import Progress


class Hooks:
    """Does nothing; `resilience.guard.Guard` saves, compares and leaves here. Every method is called on all ranks alike."""

    def batches(self, doing: str, loader: Iterable[Any], progress: Progress) -> Iterator[Any]:
        """Yields the batches of `loader`. `doing` is "training" or "evaluating"."""
        yield from loader

    def after_step(self, progress: Progress, here: Callable[[], Progress]) -> None:
        """Runs after every step. `here` completes `progress` by the sums so far; it is collective and waits for the device."""

    def check(self, progress: Progress) -> None:
        """Runs after the last step of an epoch, before its evaluation."""

    def evaluating(self, loader: Iterable[Any], progress: Progress) -> Iterator[Any]:
        """Yields the batches of an evaluation."""
        yield from self.batches("evaluating", loader, progress)

    def end_epoch(self, progress: Progress, last: bool) -> None:
        """Runs after an evaluation, with `progress` at the beginning of the next epoch."""
