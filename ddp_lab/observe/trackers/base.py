"""The interface of a tracker: three methods, and a constructor with the run and options."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Media = NDArray[np.uint8] | str
Status = Literal["finished", "preempted", "interrupted", "failed"]


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker knows of the run.

    Attributes:
        path: the run directory, in which a tracker writes by default.
        id: the same in every launch of the run, and another for each tracker.
        config: the resolved config.
        hparams: what distinguishes runs, for a table: data, model, strategy, learning rate and
            others.
        start: the first epoch of this launch, and the number of steps before it.
    """

    path: Path
    id: str
    config: dict[str, Any]
    hparams: dict[str, Any]
    start: tuple[int, int]


class Tracker(Protocol):
    """A tracker.

    Only rank 0 constructs one: `Tracker(run, **options)`, with a TrackedRun and the keys of its
    options.

    All is called in one thread of its own, in which it may wait and raise. After a restart it gets
    the rows that an interrupted launch could no longer pass on, and none for the second time,
    except one after which the launch was killed before it had written the row's position to
    tracker.NAME.json. A class with `holds_step = True`, which writes a step when the next one
    begins, also gets the last step of a launch that has crashed.
    """

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int | None) -> None:
        """Record a row of metrics, such as loss/val.

        Args:
            metrics: by name.
            step: number of training steps since the beginning of the run.
            epoch: the epoch that has ended; None: the row is that of a step.
        """
        ...

    def log_media(self, name: str, media: Media, step: int, epoch: int) -> None:
        """Record a picture, uint8 [height, width, 3], or a text in Markdown."""
        ...

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """End the records of this launch.

        Args:
            status: how it ended.
            summary: of a finished run the result: epoch, checkpoint and metrics, such as
                result/test_loss. Else empty.
        """
        ...


MakeTracker = Callable[[TrackedRun], Tracker]
