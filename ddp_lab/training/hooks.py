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
            progress: the position after the step, except that `sums` and `seconds` are those at the start of the epoch or, in a
                resumed epoch, at the start of this launch.
            here: returns the position with the current `sums` and `seconds`. Collective; waits for the device.
        """

    def check(self, progress: Progress) -> None:
        """Run after the last step of an epoch, before its evaluation, with `progress` after that step."""

    def evaluating(self, loader: Iterable[Any], progress: Progress, done: int = 0) -> Iterator[Any]:
        """Yield the batches of an evaluation. `done` is the number of batches of other sets that were evaluated before."""
        yield from self.batches("evaluating", loader, progress)

    def end_epoch(self, progress: Progress, last: bool) -> None:
        """Run after an evaluation, with `progress` at the beginning of the next epoch. `last`: no epoch follows."""
