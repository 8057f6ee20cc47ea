"""The learning-rate schedule of a run that ends after a time: its number of steps is predicted.

It is predicted once, early in the run, by rank 0's clock, and kept in checkpoints, so that a
resumed run has the same schedule. Until then the progress of the schedule stays at 0.

A run that is resumed with another batch size has other steps, and predicts anew when some of them
are timed. Until then it is assumed that as many samples are trained on in the time that is left.
"""

from typing import TYPE_CHECKING

from ddp_lab.config.errors import count
from ddp_lab.observe.log import log
from ddp_lab.training.hooks import Hook, Run
from ddp_lab.training.progress import Progress
from ddp_lab.training.schedule import Horizon

if TYPE_CHECKING:
    from ddp_lab.observe.trackers.base import Status

# Steps after which the time per step is known, and steps before that are not counted: the first
# ones are slow.
PREDICTED_AT = 50
NOT_COUNTED = 10


class TimedSchedule(Hook):
    """Sets the end of a schedule to the step at which `max_minutes` will have passed.

    Args:
        horizon: the end of the schedule by the other limits of the run, which remain.
        max_minutes: the limit.
        batch_size: of the GLOBAL batch.
    """

    def __init__(self, horizon: Horizon, max_minutes: float, batch_size: int):
        self.horizon = horizon
        self.max_minutes = max_minutes
        self.batch_size = batch_size
        self._count_from = NOT_COUNTED
        self._first: tuple[int, float] | None = None  # step and time at which counting begins

    def resume(self, progress: Progress) -> None:
        """Set the end of the schedule from a checkpoint.

        If the limit has changed since, the number of steps changes by the same factor.
        """
        self._count_from = progress.step + NOT_COUNTED
        if not progress.horizon:
            return
        steps = round(progress.horizon * self.max_minutes / progress.horizon_minutes)
        before = progress.horizon_batch_size or self.batch_size
        if before == self.batch_size:
            self._set(progress, steps, progress.horizon_is_timed)
            return
        left = (steps - progress.step) * before / self.batch_size
        self._set(progress, progress.step + max(1, round(left)), is_timed=False)

    def on_start(self, run: Run) -> None:
        self.run = run

    def on_step_end(self, position: Progress) -> None:
        """Predict the number of steps, if it is time. Collective then; waits for the device."""
        if position.horizon and position.horizon_is_timed:
            return
        if self._first is None:
            if position.step >= self._count_from:
                self._first = position.step, self.run.current().seconds_trained
            return
        first_step, first_seconds = self._first
        if position.step < PREDICTED_AT or position.step < first_step + NOT_COUNTED:
            return
        now = self.run.current().seconds_trained
        each = (now - first_seconds) / (position.step - first_step)

        def predict() -> int:
            left = 60 * self.max_minutes - now
            return position.step + max(1, round(left / each))

        runtime = self.run.strategy.runtime
        steps = runtime.broadcast_from_rank0("schedule", predict)
        place = self.horizon.position(position.step)
        self._set(position, steps, is_timed=True)
        scheduler = self.run.eager.scheduler
        # the learning rate of the next step, by the new end, and counted as this end
        scheduler.last_epoch += self.horizon.position(position.step) - place - 1
        scheduler.step()
        if runtime.is_main:
            log.info(self._note(steps, each))
            if text := self.horizon.warning():
                log.warning(text)

    def _note(self, steps: int, each: float) -> str:
        """Return a line about a predicted number of steps, of which each takes some seconds."""
        prediction = (
            f"max_minutes={self.max_minutes:g}: at {1000 * each:.3g} ms a step about "
            f"{count(steps, 'step')}"
        )
        last = self.horizon.last_step
        assert last is not None  # it was set
        if steps == last:
            return f"{prediction} until the schedule of the learning rate ends"
        return (
            f"{prediction}. The schedule of the learning rate ends after {count(last, 'step')}, "
            "the other limit of the run"
        )

    def _set(self, position: Progress, steps: int, is_timed: bool) -> None:
        position.horizon = steps
        position.horizon_minutes = self.max_minutes
        position.horizon_batch_size = self.batch_size
        position.horizon_is_timed = is_timed
        self.horizon.by_time = steps

    def close(self, status: "Status") -> None:
        """Warn if the time has passed before the end of the schedule was known."""
        position = self.run.position
        is_known = position.horizon or not position.minutes_passed
        if status == "finished" and not is_known and self.run.strategy.runtime.is_main:
            log.warning(
                f"max_minutes={self.max_minutes:g} have passed after "
                f"{count(position.step, 'step')}. The end of the schedule is predicted after "
                f"step {PREDICTED_AT}: until then the learning rate is that of its beginning, or "
                "of the warm-up"
            )
