"""Checkpoints of a run: saved in the background and verified by SHA-256 on resume. Only the newest and the best are kept.

main thread     ... step | copy to host | step  step  step ...      training waits for the copy only
writer thread                           | write, fsync, hash, rename, link the best, remove old ones |

There are two formats, and a run can resume from both. A whole checkpoint is one file, which rank 0 collects and writes. A
sharded one is a directory to which every rank writes its share (sharded_write.py).
"""

import copy
import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ddp_lab.observe.log import log
from ddp_lab.resilience.checkpoint_files import write_atomically
from ddp_lab.resilience.checkpoint_folder import (
    correct_best,
    find_to_resume,
    link_as_best,
    path_of,
    remove,
    remove_old,
    remove_other_best,
    result_in,
    step_of,
    steps_in,
)
from ddp_lab.resilience.sharded_files import is_sharded
from ddp_lab.resilience.sharded_state import collect, load_sharded, tensors_to_save
from ddp_lab.resilience.sharded_write import ShardWriter
from ddp_lab.resilience.whole_state import complete_state, in_model_order, load_whole
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.ema import EMA
from ddp_lab.training.progress import Criterion, Progress
from ddp_lab.world.runtime import Runtime


class Checkpoints:
    """The checkpoints of one run: `step_NNNNNNNN.pt` and `best.pt`, or `step_NNNNNNNN.sharded` and `best_NNNNNNNN.sharded`.

    A checkpoint has the keys "progress", "seed", "model", "optimizer" and "scheduler", and "ema" if the weights are averaged.
    Tensors have the model's own names, and a whole checkpoint contains them unsharded. Any strategy at any world size can
    therefore load what any other strategy saved.

    Args:
        folder: the directory of the files; the first save creates it.
        shapes: the shape of each tensor of the full model, by name. A file with other tensors is rejected.
        seed: the seed of this launch, compared with that of a checkpoint.
        keep: number of checkpoints `step_NNNNNNNN` to keep.
        best: metric of the validation set by which the best checkpoint is chosen and kept, too; None: it is not kept.
        ema: averages of the weights, saved under the key "ema"; None: no averages.
        sharded: whether to save sharded checkpoints.

    Attributes:
        write: writes a whole checkpoint to a path, in the writer thread. Fault injection replaces it between two saves.
        shards: writes sharded checkpoints; None: whole ones are saved.
        problem: why the last checkpoint could not be written; None if it was written or is being written. Set on rank 0.
        kept: the progress in the newest file, or at the start of the launch. Updated on rank 0 only.
    """

    def __init__(
        self,
        folder: Path,
        runtime: Runtime,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LambdaLR,
        shapes: dict[str, tuple[int, ...]],
        seed: int = 0,
        keep: int = 2,
        best: Criterion | None = None,
        ema: EMA | None = None,
        sharded: bool = False,
    ):
        self.folder, self.runtime, self.seed, self.keep, self.ema = folder, runtime, seed, keep, ema
        self.best: Criterion | None = best
        self.strategy, self.optimizer, self.scheduler, self.shapes = strategy, optimizer, scheduler, shapes
        self.problem: str | None = None
        self.kept = Progress()
        self.write: Callable[[Path, dict[str, Any]], None] = write_atomically
        self.shards = ShardWriter(runtime) if sharded else None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def resume(self, choice: str, schedule: Callable[[Progress], int]) -> Progress:
        """Load a checkpoint into the model, the optimizer and the scheduler. Collective.

        Args:
            choice: the config's `resume`: auto, never or a path.
            schedule: returns how many steps of the learning-rate schedule have been taken at a given progress.

        Returns:
            Where training resumes: the progress in the checkpoint, or the beginning if there is no checkpoint.

        Raises:
            ConfigError: the file cannot be used, or the run has checkpoints and none of them is valid.
        """
        path = self.find(choice)
        if path is None:
            return Progress()
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        load = load_sharded if is_sharded(path) else load_whole
        state = load(path, self.shapes, self.strategy, self.optimizer, self.ema)
        progress = self.kept = Progress.of(state["progress"])
        # The state comes from the file; learning rate, momentum and other options come from this launch's config.
        step = schedule(progress)
        self.scheduler.load_state_dict(state["scheduler"] | {"base_lrs": self.scheduler.base_lrs, "last_epoch": step})
        for group, options, factor in zip(self.optimizer.param_groups, groups, self.scheduler.lr_lambdas, strict=True):
            group.update(options, lr=options["initial_lr"] * factor(step))
        # Files of later steps are from a continuation of the run that is now abandoned, as are the metrics of later epochs.
        if self.runtime.rank == 0:
            for other in self.files():
                if step_of(other) > progress.step:
                    remove(other)
            correct_best(self.folder, Path(path), progress.is_best(self.best), progress.step)
        if self.best is not None:  # what later epochs must surpass is the file that there is, if this metric has chosen it
            found: str = self.runtime.agree("best", self._record_of_best)
            progress = self.kept = progress.with_best(self.best, Progress(**json.loads(found)) if found else None)
        log.info(f"resumed from {path}: {progress}")
        if self.ema is not None and "ema" not in state:
            log.info("the checkpoint has no averages of the weights (ema): they start from its weights")
        if state["seed"] != self.seed and self.runtime.rank == 0:
            log.warning(
                f"seed={self.seed}: the checkpoint has seed={state['seed']}, so the order of the samples changes from here on"
            )
        return progress

    def _record_of_best(self) -> str:
        """Return the position in the best checkpoint as JSON; empty if there is none."""
        found = result_in(self.folder, self.best)
        return json.dumps(asdict(found[1])) if found else ""

    def find(self, choice: str) -> str | None:
        """Return the checkpoint to resume from; as `find_to_resume`. Collective."""
        return find_to_resume(self.folder, choice, self.runtime)

    def files(self) -> list[Path]:
        """Return the checkpoints to resume from, oldest first."""
        return steps_in(self.folder)

    def save(self, progress: Progress, newest: bool = True) -> None:
        """Copy the state to the host and let the writer threads write it in the background. Collective.

        If it cannot be written, the earlier checkpoints are kept, and `problem` is set to the reason.

        Args:
            progress: the progress in the checkpoint.
            newest: whether a run can resume from it with resume=auto; False: it is only kept as the best.
        """
        self.wait()  # one save at a time: a disk that is slower than training slows it down, but memory stays bounded
        if self.ema is not None:
            self.ema.end_use()  # a preemption may interrupt an evaluation
        path = path_of(self.folder, progress.step, self.shards is not None, newest)
        written = self._copy_whole(path, progress) if self.shards is None else self._copy_share(self.shards, path, progress)
        if written is not None:
            self._pending = self._writer.submit(self._write, replace(progress), path, newest, written)

    def _copy_whole(self, path: Path, progress: Progress) -> Callable[[], None] | None:
        """Collect the complete state on rank 0, and return there what writes it; None on the other ranks. Collective."""
        collected = complete_state(self.strategy, self.optimizer, self.scheduler, self.ema)
        if collected is None:
            return None
        state = in_model_order(collected, self.shapes) | {"progress": asdict(progress), "seed": self.seed}

        def write() -> None:
            self.folder.mkdir(exist_ok=True)
            self.write(path, state)

        return write

    def _copy_share(self, shards: ShardWriter, path: Path, progress: Progress) -> Callable[[], None]:
        """Copy this rank's share of the state, and return what writes it. Collective."""
        tensors, optimizer = tensors_to_save(self.strategy, self.optimizer, self.ema)
        share, optimizers = shards.share(tensors, optimizer)
        state = {"scheduler": self.scheduler.state_dict(), "progress": asdict(progress), "seed": self.seed}
        state |= {"names": list(self.shapes), "optimizer": collect(optimizers, self.shapes)}
        state = copy.deepcopy(state)
        return lambda: shards.write(path, share, state)

    def wait(self) -> None:
        """Wait until the last save has ended, successfully or not."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _write(self, progress: Progress, path: Path, newest: bool, written: Callable[[], None]) -> None:
        """Write a checkpoint in the writer thread: `written` writes this rank's part of it, and rank 0 does the rest."""
        try:
            written()
            self.problem = None
            if self.runtime.rank != 0:
                return
            if not newest:
                remove_other_best(path)
                return
            self.kept = progress
            if progress.is_best(self.best):
                link_as_best(path)
        except (OSError, RuntimeError) as error:  # torch may raise a RuntimeError for a full disk
            free = shutil.disk_usage(self.folder).free / 2**20 if self.folder.exists() else 0
            valid = [str(file) for file in self.files() if file != path]
            self.problem = (
                f"{path} could not be written ({str(error).splitlines()[0]}; {free:,.0f} MiB are free there); the last valid "
                f"checkpoint is {valid[-1] if valid else 'none'}. Free disk space, or lower checkpoint.keep ({self.keep})"
            )
            if not self.folder.parent.exists():
                self.problem = f"{path} could not be written: the run directory {self.folder.parent} no longer exists"
            log.error(self.problem)
            return
        remove_old(self.folder, path, self.keep)
