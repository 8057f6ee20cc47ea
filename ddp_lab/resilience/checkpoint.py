"""Checkpoints that survive: written beside their place, hashed, renamed; the last ones kept; a bad one passed over.

main thread     ... step | copy to host | step  step  step ...      training waits for the copy only
writer thread                           | write, fsync, hash, rename, remove old ones |
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
from ddp_lab.resilience.checkpoint_files import damage, digest_of, in_order, load_checkpoint, sha256, write_whole
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.progress import Progress
from ddp_lab.world.runtime import Runtime


class Checkpoints:
    """The files `step_NNNNNNNN.pt` of one run, each with its SHA-256 beside it, in the format of `sha256sum`.

    A file is {"progress", "seed", "model", "optimizer", "scheduler"}, the whole of each, tensors under plain names, so that any
    strategy at any world size loads what any other saved.

    Args:
        shapes: of the whole model's tensors, by name; what a file must have to be resumed from.
        keep: how many files stay.

    Attributes:
        write: writes a state to a path, in a thread of its own; may be exchanged between two saves, as fault injection does.
        problem: why the last file could not be written; None: it could, or is being written. Rank 0 knows.
        kept: where the run stands in its newest file, or stood at the start. Rank 0 knows.
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
    ):
        self.folder, self.runtime, self.seed, self.keep = folder, runtime, seed, keep
        self.strategy, self.optimizer, self.scheduler, self.shapes = strategy, optimizer, scheduler, shapes
        self.problem: str | None = None
        self.kept = Progress()
        self.write: Callable[[Path, dict[str, Any]], None] = write_whole
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None

    def resume(self, word: str, schedule: Callable[[Progress], int]) -> Progress:
        """Loads what `word` (auto, never or a path) asks for, and returns where to go on; the beginning without a checkpoint.

        Args:
            schedule: how many steps of the learning-rate schedule are behind a run that stands there.

        Raises:
            ConfigError: the file cannot be used, or none of the run's is whole.
        """
        path = self.runtime.agree("checkpoint", lambda: self.find(word))
        if path is None:
            return Progress()
        state = load_checkpoint(path, self.shapes)
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        if groups[0].keys() != state["optimizer"]["param_groups"][0].keys() - {"params"}:
            raise ConfigError(f"resume={path}: was written with another optimizer; choose that one, or another name")
        self.strategy.load_state_dict(self.optimizer, state)
        progress = self.kept = Progress(**state["progress"])
        # Learning rate, momentum and the like are the config's of this launch; the file has the state.
        step = schedule(progress)
        self.scheduler.load_state_dict(state["scheduler"] | {"base_lrs": self.scheduler.base_lrs, "last_epoch": step})
        for group, options, factor in zip(self.optimizer.param_groups, groups, self.scheduler.lr_lambdas, strict=True):
            group.update(options, lr=options["initial_lr"] * factor(step))
        if self.runtime.rank == 0:  # files of later steps belong to a branch that this run leaves, as its records do
            for later in self.files():
                if later.name > f"step_{progress.step:08d}.pt":
                    later.unlink()
                    digest_of(later).unlink(missing_ok=True)
        log.info(f"resumed from {path}: {progress}")
        if state["seed"] != self.seed and self.runtime.rank == 0:
            log.warning(f"seed={self.seed}: the checkpoint's was {state['seed']}, so the order of the samples changes here")
        return progress

    def find(self, word: str) -> str | None:
        """The file to go on from. The newest that is whole, for auto: those passed over are named.

        Raises:
            ConfigError: there are files and none is whole.
        """
        self._tidy()
        if word != "auto":
            return None if word == "never" else word
        bad = []
        # A hash whose file is gone tells of a checkpoint that was lost.
        lost = {digest.with_suffix("") for digest in self.folder.glob("step_*.pt.sha256")} - set(self.files())
        for path in reversed(in_order([*self.files(), *lost])):
            problem = damage(path)
            if problem is None:
                for other, why in bad:
                    log.warning(f"{other} is damaged ({why}); going on from {path}, the newest that is whole")
                return str(path)
            bad.append((path, problem))
        if bad:
            listed = "; ".join(f"{path}: {why}" for path, why in bad)
            raise ConfigError(
                f"resume=auto: none of the run's checkpoints is whole ({listed}). Choose another name to begin anew"
            )
        return None

    def _tidy(self) -> None:
        """Ends what a killed launch was writing: a file without its hash gets it, half a file goes."""
        for digest in self.folder.glob("*.sha256.tmp"):
            path = digest.with_name(digest.name.removesuffix(".sha256.tmp") + ".pt")
            if path.exists() and digest.read_text().startswith(sha256(path)):
                os.replace(digest, digest_of(path))
        for half in self.folder.glob("*.tmp"):
            half.unlink()

    def files(self) -> list[Path]:
        """Oldest first."""
        return in_order(self.folder.glob("step_*.pt"))

    def save(self, progress: Progress) -> None:
        """Copies the state to the host; rank 0 writes it in the background. Collective.

        A file that cannot be written leaves the earlier ones as they are, and its reason in `problem`.
        """
        self.wait()  # one at a time: a disk slower than training slows it down, and memory stays bounded
        state = {"scheduler": self.scheduler.state_dict(), **self.strategy.state_dict(self.optimizer)}
        if self.runtime.rank == 0:
            # What lives on the host (AdamW's step does on GPUs, too) is the optimizer's own, which the next step changes.
            state = copy.deepcopy(state) | {"progress": asdict(progress), "seed": self.seed}
            self._pending = self._writer.submit(self._write, replace(progress), state)

    def wait(self) -> None:
        """Until the last file is on the disk, or failed to get there."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _write(self, progress: Progress, state: dict[str, Any]) -> None:
        path = self.folder / f"step_{progress.step:08d}.pt"
        try:
            self.folder.mkdir(exist_ok=True)
            self.write(path, state)
            self.problem, self.kept = None, progress
        except (OSError, RuntimeError) as error:  # a full disk is a RuntimeError of torch's, too
            free = shutil.disk_usage(self.folder).free / 2**20 if self.folder.exists() else 0
            whole = [str(file) for file in self.files() if file != path]
            self.problem = (
                f"{path} could not be written ({str(error).splitlines()[0]}; {free:,.0f} MiB are free there); the last good "
                f"checkpoint is {whole[-1] if whole else 'none'}. Make room, or lower checkpoint.keep ({self.keep})"
            )
            if not self.folder.parent.exists():
                self.problem = f"{path} could not be written: {self.folder.parent} is gone"
            log.error(self.problem)
            return
        # Files of later steps belong to a branch that this run has left, as its records do.
        files = self.files()
        last = files.index(path) + 1
        for old in files[: max(0, last - self.keep)] + files[last:]:
            old.unlink()
            digest_of(old).unlink(missing_ok=True)
