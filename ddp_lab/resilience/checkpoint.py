"""Checkpoints of a run: saved in the background and verified by SHA-256 on resume. Only the newest and the best are kept.

main thread     ... step | copy to host | step  step  step ...      training waits for the copy only
writer thread                           | write, fsync, hash, rename, link the best, remove old ones |
"""

import copy
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.observe.logger import log
from ddp_lab.resilience.checkpoint_files import (
    BEST,
    by_step,
    correct_best,
    damage,
    digest_of,
    in_order,
    link_atomically,
    load_checkpoint,
    remove,
    sha256,
    write_atomically,
)
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.ema import EMA
from ddp_lab.training.progress import BestBy, Progress
from ddp_lab.world.runtime import Runtime


class Checkpoints:
    """The files `step_NNNNNNNN.pt` and `best.pt` of one run, each with a SHA-256 file in the format of `sha256sum`.

    A file has the keys "progress", "seed", "model", "optimizer" and "scheduler", and "ema" if the weights are averaged. It
    contains full tensors, not shards, under the model's own names. Any strategy at any world size can therefore load what any
    other strategy saved.

    Args:
        folder: the directory of the files; the first save creates it.
        shapes: the shape of each tensor of the full model, by name. A file with other tensors is rejected.
        seed: the seed of this launch, compared with that of a checkpoint.
        keep: number of files `step_NNNNNNNN.pt` to keep.
        best: metric of the test set by which the best checkpoint is chosen and kept as `best.pt`; None: no such file.
        ema: averages of the weights, saved under the key "ema"; None: no averages.

    Attributes:
        write: writes a state to a path, in the writer thread. It may be replaced between two saves, as fault injection does.
        problem: why the last file could not be written; None if it was written or is being written. Set on rank 0 only.
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
        best: BestBy | None = None,
        ema: EMA | None = None,
    ):
        self.folder, self.runtime, self.seed, self.keep, self.ema = folder, runtime, seed, keep, ema
        self.best: BestBy | None = best
        self.strategy, self.optimizer, self.scheduler, self.shapes = strategy, optimizer, scheduler, shapes
        self.problem: str | None = None
        self.kept = Progress()
        self.write: Callable[[Path, dict[str, Any]], None] = write_atomically
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
        path = self.runtime.agree("checkpoint", lambda: self.find(choice))
        if path is None:
            return Progress()
        state = load_checkpoint(path, self.shapes)
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        saved, expected = state["optimizer"]["param_groups"][0].keys() - {"params"}, groups[0].keys()
        if saved != expected:
            raise ConfigError(
                f"resume={path}: was written with another optimizer: its options are {', '.join(sorted(saved))}; expected "
                f"{', '.join(sorted(expected))}. Use the optimizer that it was trained with, or another name"
            )
        self._check_frozen(path, {name for group in state["optimizer"]["param_groups"] for name in group["params"]})
        if self.ema is not None:
            self.ema.load_state_dict(state.get("ema", state["model"]))
        self.strategy.load_state_dict(self.optimizer, state)
        progress = self.kept = Progress(**state["progress"])
        # The state comes from the file; learning rate, momentum and other options come from this launch's config.
        step = schedule(progress)
        self.scheduler.load_state_dict(state["scheduler"] | {"base_lrs": self.scheduler.base_lrs, "last_epoch": step})
        for group, options, factor in zip(self.optimizer.param_groups, groups, self.scheduler.lr_lambdas, strict=True):
            group.update(options, lr=options["initial_lr"] * factor(step))
        # Files of later steps are from a continuation of the run that is now abandoned, as are the metrics of later epochs.
        if self.runtime.rank == 0:
            for other in self.files():
                if by_step(other) > by_step(Path(f"step_{progress.step:08d}.pt")):
                    remove(other)
            correct_best(self.folder / BEST, Path(path), progress.is_best(self.best), progress.step)
        log.info(f"resumed from {path}: {progress}")
        if self.ema is not None and "ema" not in state:
            log.info("the checkpoint has no averages of the weights (ema): they start from its weights")
        if state["seed"] != self.seed and self.runtime.rank == 0:
            log.warning(
                f"seed={self.seed}: the checkpoint has seed={state['seed']}, so the order of the samples changes from here on"
            )
        return progress

    def _check_frozen(self, path: str, trained: set[str]) -> None:
        """Check that the parameters in the checkpoint's optimizer, `trained`, are those that this launch trains.

        Raises:
            ConfigError: a parameter is frozen in one of the two only, so its optimizer state is missing or superfluous.
        """
        for name, parameter in self.strategy.module.named_parameters():
            if parameter.requires_grad != (name in trained):
                now, then = ("trained", "frozen") if parameter.requires_grad else ("frozen", "trained")
                raise ConfigError(
                    f"resume={path}: the parameter {name} is {now} in this launch and was {then} when the checkpoint was "
                    f"written. Freeze the same parameters, or begin a new run from these weights: model.weights={path} with "
                    "another name"
                )

    def find(self, choice: str) -> str | None:
        """Return the file to resume from; for auto this is the newest valid one, and newer files that are damaged are logged.

        A save that an earlier launch did not finish is completed or removed first.

        Args:
            choice: the config's `resume`: auto, never or a path.

        Returns:
            The path; None if there is nothing to resume from.

        Raises:
            ConfigError: the run has checkpoints, but none of them is valid.
        """
        self._finish_interrupted_save()
        if choice != "auto":
            return None if choice == "never" else choice
        bad: list[tuple[Path, str]] = []
        # A SHA-256 whose file is missing shows that a checkpoint was lost.
        lost = {digest.with_suffix("") for digest in self.folder.glob("step_*.pt.sha256")} - set(self.files())
        for path in reversed(in_order([*self.files(), *lost])):
            problem = damage(path)
            if problem is None:
                for other, why in bad:
                    log.warning(f"{other} is damaged ({why}); resuming from {path}, the newest valid checkpoint")
                return str(path)
            bad.append((path, problem))
        if bad:
            listed = "; ".join(f"{path}: {why}" for path, why in bad)
            raise ConfigError(
                f"resume=auto: none of the run's checkpoints is valid ({listed}). Restore one, or choose another name to "
                "start a new run"
            )
        return None

    def _finish_interrupted_save(self) -> None:
        """Clean up after a launch that was killed while saving: complete the last file if possible, remove partial ones."""
        for digest in self.folder.glob("*.sha256.tmp"):
            path = digest.with_name(digest.name.removesuffix(".sha256.tmp") + ".pt")
            if path.exists() and digest.read_text().startswith(sha256(path)):
                os.replace(digest, digest_of(path))
        for partial in self.folder.glob("*.tmp"):
            partial.unlink()

    def files(self) -> list[Path]:
        """Return the checkpoint files, oldest first."""
        return in_order(self.folder.glob("step_*.pt"))

    def save(self, progress: Progress, newest: bool = True) -> None:
        """Copy the state to the host and let rank 0 write it in the background. Collective.

        If the file cannot be written, the earlier files are kept, and `problem` is set to the reason.

        Args:
            progress: the progress in the file.
            newest: whether a run can resume from it with resume=auto; False: it is only kept as the best.
        """
        self.wait()  # one save at a time: a disk that is slower than training slows it down, but memory stays bounded
        averages: dict[str, Any] = {}
        if self.ema is not None:
            self.ema.end_use()  # a preemption may interrupt an evaluation
            averages = {"ema": self.ema.state_dict()}
        state = {"scheduler": self.scheduler.state_dict(), **self.strategy.state_dict(self.optimizer)}
        if self.runtime.rank == 0:
            # `state_dict` does not copy tensors on the host (AdamW's `step`, also on GPUs), which the next step changes.
            state = copy.deepcopy(state) | {"progress": asdict(progress), "seed": self.seed} | averages
            self._pending = self._writer.submit(self._write, replace(progress), state, newest)

    def wait(self) -> None:
        """Wait until the last save has ended, successfully or not."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _write(self, progress: Progress, state: dict[str, Any], newest: bool) -> None:
        path = self.folder / (f"step_{progress.step:08d}.pt" if newest else BEST)
        try:
            self.folder.mkdir(exist_ok=True)
            self.write(path, state)
            self.problem = None
            if not newest:
                return
            self.kept = progress
            if progress.is_best(self.best):
                link_atomically(path, self.folder / BEST)
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
        # Files of later steps are from a continuation of the run that was abandoned, as are the metrics of later epochs.
        files = self.files()
        last = files.index(path) + 1
        for old in files[: max(0, last - self.keep)] + files[last:]:
            remove(old)
