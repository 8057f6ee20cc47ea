"""The checkpoints in a run's directory `checkpoints`, files (whole) and directories (sharded): their names and their order."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from ddp_lab.config.errors import ConfigError
from ddp_lab.observe.log import log
from ddp_lab.resilience.checkpoint_files import BEST, damage, digest_of, link_atomically, sha256
from ddp_lab.resilience.sharded_files import (
    SUFFIX,
    damage_of_shards,
    finish_interrupted_publish,
    is_sharded,
    link_shards,
    remove_shards,
)
from ddp_lab.resilience.sharded_read import ShardedCheckpoint
from ddp_lab.training.progress import Criterion, Progress
from ddp_lab.world.runtime import Runtime


def step_of(path: Path) -> int:
    """Return the step in the name `step_NNNNNNNN` or `best_NNNNNNNN`, which may have more than eight digits."""
    return int(path.stem.partition("_")[2])


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Return the checkpoints `step_NNNNNNNN.pt` and `step_NNNNNNNN.sharded` sorted by step."""
    return sorted(paths, key=lambda path: (step_of(path), path.suffix))


def steps_in(folder: Path) -> list[Path]:
    """Return the checkpoints to resume from, oldest first."""
    return in_order([*folder.glob("step_*.pt"), *folder.glob(f"step_*{SUFFIX}")])


def best_in(folder: Path) -> list[Path]:
    """Return the best checkpoint; none if there is none, and several only if a launch was killed while it replaced one."""
    return [*folder.glob(BEST), *in_order(folder.glob(f"best_*{SUFFIX}"))]


def path_of(folder: Path, step: int, sharded: bool, newest: bool = True) -> Path:
    """Return the path of a checkpoint. `newest` is as in `Checkpoints.save`.

    The best sharded checkpoint has its step in its name, because a directory cannot replace another one atomically.
    """
    if not (newest or sharded):
        return folder / BEST
    return folder / f"{'step' if newest else 'best'}_{step:08d}{SUFFIX if sharded else '.pt'}"


def damage_of(path: Path, runtime: Runtime) -> str | None:
    """Return why a checkpoint does not match its hashes; None if it matches. Collective, and the same on every rank."""
    if is_sharded(path):
        return damage_of_shards(path, runtime)
    return runtime.agree("damage", lambda: damage(path))


def remove(path: Path) -> None:
    """Remove a checkpoint and its hashes."""
    if is_sharded(path):
        remove_shards(path)
        return
    path.unlink()
    digest_of(path).unlink(missing_ok=True)


def remove_old(folder: Path, newest: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints up to `newest`.

    Those of later steps are from a continuation of the run that was abandoned, as are the metrics of later epochs.
    """
    files = steps_in(folder)
    kept = [path for path in files if path == newest or step_of(path) < step_of(newest)][-keep:]
    for path in files:
        if path not in kept:
            remove(path)


def link_as_best(path: Path) -> None:
    """Keep a checkpoint `step_NNNNNNNN` as the best, too, in place of an earlier one. It takes no space if links are possible.

    Raises:
        OSError: it can be neither linked nor copied.
    """
    best = path_of(path.parent, step_of(path), is_sharded(path), newest=False)
    link_shards(path, best) if is_sharded(path) else link_atomically(path, best)
    remove_other_best(best)


def remove_other_best(best: Path) -> None:
    """Remove all best checkpoints but one."""
    for other in best_in(best.parent):
        if other != best:
            remove(other)


def correct_best(folder: Path, source: Path, is_best: bool, step: int) -> None:
    """Let the best checkpoint be that of a run that resumes.

    A launch may have been killed before it linked its last checkpoint. One of a later step is from a continuation that is
    abandoned with the resume; it is removed.

    Args:
        folder: the directory of the run's checkpoints.
        source: the checkpoint that the run resumes from, perhaps one of another run.
        is_best: whether it is the best so far.
        step: its step.
    """
    if is_best and source.resolve().parent == folder.resolve() and source.name.startswith("step_"):
        try:
            link_as_best(source)
        except OSError as error:  # for example a full disk, or the SHA-256 of `source` is missing
            log.warning(f"{folder / BEST} could not be written ({error}); it is not the best checkpoint")
        return
    for best in best_in(folder):
        if (step_of(best) if is_sharded(best) else 0 if damage(best) else progress_in(best).step) > step:
            remove(best)


def progress_in(path: Path) -> Progress:
    """Return the position in a valid checkpoint. Raises a ConfigError if a sharded one is damaged."""
    if is_sharded(path):
        return Progress.of(ShardedCheckpoint(str(path), key="--checkpoint ").state["progress"])
    return Progress.of(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["progress"])


def result_in(folder: Path, criterion: Criterion | None) -> tuple[Path, Progress] | None:
    """Return the best checkpoint by a metric and the position in it; None if there is none: the last weights are the result.

    One that another metric has chosen, or the test set in older versions, is not the best by this one.
    """
    for path in reversed(best_in(folder)):
        with suppress(ConfigError):
            if (is_sharded(path) or damage(path) is None) and (progress := progress_in(path)).is_best(criterion):
                return path, progress
    return None


def finish_interrupted_save(folder: Path) -> None:
    """Clean up after a launch that was killed while saving: complete the last checkpoint if possible, remove partial ones."""
    finish_interrupted_publish(folder)
    for digest in folder.glob("*.sha256.tmp"):
        path = digest.with_name(digest.name.removesuffix(".sha256.tmp") + ".pt")
        if path.exists() and digest.read_text().startswith(sha256(path)):
            os.replace(digest, digest_of(path))
    for partial in folder.glob("*.tmp"):
        partial.unlink()


def find_to_resume(folder: Path, choice: str, runtime: Runtime) -> str | None:
    """Return the checkpoint to resume from; for auto the newest valid one, and newer ones that are damaged are logged.

    Collective. A save that an earlier launch did not finish is completed or removed first.

    Args:
        folder: the directory of the run's checkpoints.
        choice: the config's `resume`: auto, never or a path.

    Returns:
        The path; None if there is nothing to resume from.

    Raises:
        ConfigError: the run has checkpoints, but none of them is valid; or the path is a damaged sharded checkpoint.
    """

    def candidates() -> str:
        finish_interrupted_save(folder)
        files = steps_in(folder)
        # A SHA-256 whose file is missing shows that a checkpoint was lost.
        lost = {digest.with_suffix("") for digest in folder.glob("step_*.pt.sha256")} - set(files)
        return json.dumps([str(path) for path in reversed(in_order([*files, *lost]))])

    found: list[str] = json.loads(runtime.agree("checkpoints", candidates))
    if choice != "auto":
        if is_sharded(choice) and (problem := damage_of(Path(choice), runtime)):
            raise ConfigError(f"resume={choice}: the checkpoint is damaged: {problem}. Use another checkpoint")
        return None if choice == "never" else choice
    bad: list[tuple[str, str]] = []
    for path in found:
        problem = damage_of(Path(path), runtime)
        if problem is None:
            for other, why in bad if runtime.rank == 0 else []:
                log.warning(f"{other} is damaged ({why}); resuming from {path}, the newest valid checkpoint")
            return path
        bad.append((path, problem))
    if bad:
        listed = "; ".join(f"{path}: {why}" for path, why in bad)
        raise ConfigError(
            f"resume=auto: none of the run's checkpoints is valid ({listed}). Restore one, or choose another name to "
            "start a new run"
        )
    return None
