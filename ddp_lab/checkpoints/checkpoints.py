"""Checkpoints of a run: saved in the background and verified by SHA-256 on resume.

Only the newest and the best are kept.

main thread    ... step | copy to host | step  step  step ...     training waits for the copy only
writer thread                          | write, fsync, hash, rename, link the best, remove old |

There are two formats, and a run can resume from both. One file contains the full state, which rank
0 collects and writes. A sharded checkpoint is a directory to which every rank writes its shards
(sharded.py).
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_lab.checkpoints.files import (
    SHARDED,
    delete,
    forget_best,
    link_best,
    remove,
    remove_old,
    step_of,
    steps_in,
)
from ddp_lab.checkpoints.find import find_checkpoint, open_checkpoint, result_in
from ddp_lab.checkpoints.state import SET_BY_LOOP, State, Write, copy_full
from ddp_lab.observe.log import log
from ddp_lab.training.progress import Criterion, Progress

if TYPE_CHECKING:
    from ddp_lab.checkpoints.saved import SavedCheckpoint

# size in bytes of a checkpoint from which checkpoint.format=auto shards it
SHARDED_FROM = 4 * 2**30


def is_sharded_format(choice: str, ranks: int, size: int) -> bool:
    """Return whether checkpoints are sharded.

    Args:
        choice: the config key `checkpoint.format`.
        ranks: number of ranks.
        size: bytes of a checkpoint.
    """
    return choice == "sharded" or (choice == "auto" and ranks > 1 and size >= SHARDED_FROM)


def ignore(path: Path) -> None:
    """Do nothing about a checkpoint."""


class Checkpoints:
    """The checkpoints of one run.

    They are named `step_NNNNNNNN.pt` or `step_NNNNNNNN.sharded`; a link names the best of them.

    A checkpoint has the keys "progress", "seed", "model", "optimizer" and "scheduler", "task" if
    the loss has changed buffers of its own, and "ema" if the weights are averaged. Tensors have the
    model's own names, and one file contains them unsharded. Any strategy at any world size can
    therefore load what any other strategy saved.

    Args:
        folder: the directory of the files; the first save creates it.
        state: what is saved, and loaded in place.
        keep: number of checkpoints to keep.
        best: metric of the validation set by which the best checkpoint is chosen and kept, too;
            None: it is not kept.
        sharded: whether to save sharded checkpoints. Collective then.
        before_write: called in the writer thread with a path before this rank writes there.

    Attributes:
        problem: why the last checkpoint could not be written; None if it was written or is being
            written. Set on rank 0.
        kept: the progress in the newest checkpoint, or at the start of the launch. Updated on rank
            0 only.
    """

    def __init__(
        self,
        folder: Path,
        state: State,
        keep: int = 2,
        best: Criterion | None = None,
        sharded: bool = False,
        before_write: Callable[[Path], None] = ignore,
    ):
        self.folder = folder
        self.state = state
        self.keep = keep
        self.runtime = state.strategy.runtime
        self.best: Criterion | None = best
        self.problem: str | None = None
        self.kept = Progress()
        self.before_write = before_write
        self._shards = None
        if sharded:
            from ddp_lab.checkpoints.sharded import ShardWriter  # it loads 700 modules in 0.5 s

            self._shards = ShardWriter(self.runtime)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def resume(self, source: Path | None, schedule: Callable[[Progress], int]) -> Progress:
        """Load a checkpoint into the model, the optimizer and the scheduler.

        Collective. A save that was killed is cleaned up.

        Args:
            source: a checkpoint; `folder`, of which the newest valid one is loaded; or None, to
                load nothing.
            schedule: returns how many steps of the learning-rate schedule have been taken at a
                given progress.

        Returns:
            Where training resumes: the progress in the checkpoint, or the beginning if there is no
            checkpoint.

        Raises:
            ConfigError: the file cannot be used, or the run has checkpoints and none of them is
                valid.
        """
        if self.runtime.is_main:
            delete(self.folder.glob("*.tmp"))  # what a launch that was killed while saving has left
        choice = "auto" if source == self.folder else str(source)
        path = find_checkpoint(self.folder, choice, self.runtime) if source else None
        if path is None:
            return Progress()

        state = self.state
        saved = open_checkpoint(path)
        saved.check(state.shapes)
        saved.check_optimizer(state)
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in state.optimizer.param_groups
        ]
        saved.load(state)
        counters = saved.counters(state)
        rates = saved.rates(state)

        progress = Progress.of(saved.state["progress"])
        if state.ema is not None:
            steps_taken = progress.step
            if state.strategy.loss_scale is not None:
                steps_taken -= state.strategy.loss_scale.saved()["skipped_steps"]
            if not saved.has_averages:
                progress.averaged_from = steps_taken
            state.ema.resume(steps_taken - progress.averaged_from)
        # The state and what the optimizer counts in its groups come from the file, and a learning
        # rate that a loop had set; other options come from this launch's config.
        step = schedule(progress)
        scheduler = state.scheduler
        is_set_by_loop = getattr(scheduler, SET_BY_LOOP, False)
        saved_scheduler = {
            key: value for key, value in saved.state["scheduler"].items() if key != SET_BY_LOOP
        }
        scheduler.load_state_dict(
            saved_scheduler | {"base_lrs": scheduler.base_lrs, "last_epoch": step}
        )
        for group, options, factor, counted, rate in zip(
            state.optimizer.param_groups, groups, scheduler.lr_lambdas, counters, rates, strict=True
        ):
            group.update(options)
            if not is_set_by_loop:
                group["lr"] = options["initial_lr"] * factor(step)
            group.update(counted)
            if rate is not None:
                group["lr"] = rate

        keeps_best = self.runtime.broadcast_from_rank0(
            "best", lambda: self._abandon_later(path, progress)
        )
        if self.best is not None and not keeps_best:
            progress = progress.without_best(self.best)
        self.kept = progress
        self._log_resumed(path, saved, progress)
        return progress

    def _log_resumed(self, path: Path, saved: "SavedCheckpoint", progress: Progress) -> None:
        """Log where the training resumes, and what the checkpoint lacks or has otherwise."""
        state = self.state
        log.info(f"resumed from {path}: {progress}")
        if state.ema is not None and not saved.has_averages:
            log.info(
                "the checkpoint has no averages of the weights (ema): they start from its weights"
            )

        if saved.state["seed"] != state.seed and self.runtime.is_main:
            log.warning(
                f"seed={state.seed}: the checkpoint has seed={saved.state['seed']}, so the order "
                "of the samples changes from here on"
            )

    def _abandon_later(self, path: Path, progress: Progress) -> bool:
        """Remove checkpoints of later steps, from a continuation of the run that is now abandoned.

        Returns:
            Whether the best checkpoint so far is kept. If it is not, because later steps replaced
            it or another metric chose it, the next epoch is the best.
        """
        for other in steps_in(self.folder):
            if step_of(other) > progress.step:
                remove(other)
        if progress.is_best(self.best) and path.resolve() in [
            file.resolve() for file in steps_in(self.folder)
        ]:
            with suppress(OSError):  # the launch may have been killed before it did this
                link_best(path.resolve())

        best = self.best
        if best is None:
            return False
        best_result = result_in(self.folder, best)
        if best_result and best_result[1].best[best] == progress.best.get(best):
            return True
        forget_best(self.folder)
        return False

    def save(self, progress: Progress, after_write: Callable[[Path], None] = ignore) -> None:
        """Copy the state to the host and let the writer threads write it in the background.

        Collective.

        If it cannot be written, the earlier checkpoints are kept, and `problem` is set to the
        reason.

        Args:
            progress: the position in the checkpoint.
            after_write: called in rank 0's writer thread with the path of the checkpoint, when it
                is written.
        """
        # one save at a time: a disk that is slower than training slows it down, but memory stays
        # bounded
        self.wait()
        if self.state.ema is not None:
            self.state.ema.end_use()  # a preemption may interrupt an evaluation
        path = self.folder / f"step_{progress.step:08d}{'.pt' if self._shards is None else SHARDED}"
        write = (copy_full if self._shards is None else self._shards.copy)(self.state, progress)
        if write is not None:
            self._pending = self._writer.submit(
                self._write, replace(progress), path, write, after_write
            )

    def wait(self) -> None:
        """Wait until the last save has ended, successfully or not."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _write(
        self, progress: Progress, path: Path, write: Write, after_write: Callable[[Path], None]
    ) -> None:
        """Write a checkpoint in the writer thread.

        `write` writes this rank's part of it, and rank 0 does the rest.
        """
        try:
            self.folder.mkdir(exist_ok=True)
            write(path, partial(self.before_write, path))
            self.problem = None
            if self.runtime.is_main:
                self.kept = progress
                if progress.is_best(self.best):
                    link_best(path)
        except (OSError, RuntimeError) as error:  # torch may raise a RuntimeError for a full disk
            from ddp_lab.world.write_errors import explain_write

            reason, remedy = explain_write(error, self.folder)
            valid = [str(file) for file in steps_in(self.folder) if file != path]
            fewer = f", or lower checkpoint.keep ({self.keep})" if "disk space" in remedy else ""
            self.problem = (
                f"{path} could not be written ({reason}); the last valid checkpoint is "
                f"{valid[-1] if valid else 'none'}. {remedy}{fewer}"
            )
            if not self.folder.parent.exists():
                self.problem = (
                    f"{path} could not be written: the run directory {self.folder.parent} no "
                    "longer exists"
                )
            log.error(self.problem)
            return

        if self.runtime.is_main:
            remove_old(self.folder, self.keep)
            after_write(path)
