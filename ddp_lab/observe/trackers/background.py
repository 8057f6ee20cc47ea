"""The trackers of a run. One that fails or hangs is logged once, and never stops the training."""

import importlib
import json
import queue
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ddp_lab.config.errors import describe_error
from ddp_lab.config.types import EXTRAS
from ddp_lab.observe.log import log
from ddp_lab.observe.metrics_file import OF_STEP
from ddp_lab.observe.trackers.base import MakeTracker, Media, Status, TrackedRun, Tracker
from ddp_lab.world.process import replace_text

QUEUED = 10_000  # the most rows that wait for a tracker: some 10 MB
# seconds that a finished run waits for its trackers: making MLflow's database took 34 on two busy
# cores
WAIT = 60.0
# the same for a run that ends otherwise: torchrun, Slurm and Kubernetes kill it 30 s after SIGTERM
WAIT_BRIEFLY = 20.0


class Guarded:
    """A tracker that is called in this thread, as TensorBoard, whose disk is that of metrics.jsonl.

    Its errors are logged.

    Args:
        name: as in `tracker=NAME`.
        make: constructs it.
        run: what it tracks.
    """

    def __init__(self, name: str, make: MakeTracker, run: TrackedRun):
        self.name = name
        self._reported = False
        self._tracker: Tracker | None = None
        self._open(make, run)

    def call(self, method: str, *arguments: Any) -> bool:
        """Call a method of the tracker. Return whether it has returned without an error."""
        return self._tracker is not None and self._guard(
            lambda: getattr(self._tracker, method)(*arguments)
        )

    def wait(self, deadline: float) -> None:
        """Wait until all calls have ended, up to a time as of time.monotonic."""

    def _open(self, make: MakeTracker, run: TrackedRun) -> None:
        def construct() -> None:
            self._tracker = make(run)

        self._guard(construct)

    def _guard(self, action: Any) -> bool:
        try:
            action()
        except (Exception, SystemExit) as error:
            self._report(f"failed ({describe_error(error)})")
            return False
        return True

    def _report(self, problem: str) -> None:
        if not self._reported:
            log.error(
                f"tracker={self.name} {problem}: its records are incomplete; training continues"
            )
        self._reported = True


class Background(Guarded):
    """A tracker that is called in a thread of its own.

    The file tracker.NAME.json of the run directory has its id, and the position of the last row
    that it has recorded. So a launch that resumes passes on what an interrupted one could not, and
    nothing twice, except a row after which it was killed before this file was written.
    """

    def __init__(self, name: str, make: MakeTracker, run: TrackedRun):
        self._file = run.path / f"tracker.{name}.json"
        self._state: dict[str, Any] = {"id": uuid.uuid4().hex, "recorded": [-1, 0]}
        with suppress(OSError, ValueError):
            self._state |= json.loads(self._file.read_text())
        self._before = self._state["recorded"]
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(QUEUED)
        super().__init__(name, make, replace(run, id=self._state["id"]))

    def call(self, method: str, *arguments: Any) -> bool:
        if method == "log_metrics" and position(*arguments) <= self._before:
            return True
        try:
            self._queue.put_nowait((method, arguments))
        except queue.Full:
            self._report(f"hangs or is too slow, {QUEUED} calls wait")
            return False
        return True

    def wait(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._report("has not finished in time")

    def _open(self, make: MakeTracker, run: TrackedRun) -> None:
        if self.name in EXTRAS:
            # Here, because DataLoader processes may be forked meanwhile, and would inherit the
            # locks of half imported modules.
            self._guard(lambda: importlib.import_module(self.name))
        self._thread = threading.Thread(
            target=self._work, args=(make, run), name=f"tracker={self.name}", daemon=True
        )
        self._thread.start()

    def _work(self, make: MakeTracker, run: TrackedRun) -> None:
        # positions of rows
        recorded = self._before
        passed = self._before
        self._guard(partial(self._save, recorded))
        super()._open(make, run)
        while self._tracker is not None:
            method, arguments = self._queue.get()
            if super().call(method, *arguments) and method != "log_media":
                row = position(*arguments) if method == "log_metrics" else passed
                if method == "finish" or not getattr(self._tracker, "holds_step", False):
                    recorded = row
                elif row[0] > passed[0]:
                    recorded = passed
                passed = row
                self._guard(partial(self._save, recorded))
            if method == "finish":
                return

    def _save(self, recorded: list[int]) -> None:
        replace_text(self._file, json.dumps(self._state | {"recorded": recorded}))


def position(metrics: Mapping[str, float], step: int, epoch: int | None) -> list[int]:
    """Return the place of a row in the order of rows: an evaluation comes after its step.

    Arguments as of `Tracker.log_metrics`.
    """
    is_step = epoch is None and all(name.startswith(OF_STEP) for name in metrics)
    return [step, int(not is_step)]


class Trackers:
    """All trackers of a run, on rank 0.

    Args:
        chosen: what constructs each, by name.
        run: what they track; its id is replaced by one of each.
        patience: seconds that `finish` may take.
    """

    def __init__(self, chosen: Mapping[str, MakeTracker], run: TrackedRun, patience: float = WAIT):
        self._patience = patience
        kinds = {"tensorboard": Guarded}
        self._trackers = [
            kinds.get(name, Background)(name, make, run) for name, make in chosen.items()
        ]

    @property
    def is_used(self) -> bool:
        """Whether there is a tracker."""
        return bool(self._trackers)

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int | None) -> None:
        """Record a row of metrics, as in `Tracker`."""
        self._call("log_metrics", metrics, step, epoch)

    def log_media(self, name: str, media: Media, step: int, epoch: int) -> None:
        """Record a picture or a text, as in `Tracker`."""
        self._call("log_media", name, media, step, epoch)

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """End the records of this launch, and wait for them within limits."""
        self._call("finish", status, {f"result/{name}": value for name, value in summary.items()})
        deadline = time.monotonic() + min(
            self._patience, WAIT if status == "finished" else WAIT_BRIEFLY
        )
        for tracker in self._trackers:
            tracker.wait(deadline)

    def _call(self, method: str, *arguments: Any) -> None:
        for tracker in self._trackers:
            tracker.call(method, *arguments)
