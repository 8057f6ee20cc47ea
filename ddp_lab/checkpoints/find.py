"""Which checkpoint a launch resumes from and a command uses: the same on all ranks."""

from pathlib import Path
from typing import TYPE_CHECKING

from ddp_lab.checkpoints.files import best_in, find_damage, is_sharded, steps_in, sums_of
from ddp_lab.config.errors import ConfigError
from ddp_lab.observe.log import log
from ddp_lab.training.progress import Criterion, Progress
from ddp_lab.world.runtime import Runtime

if TYPE_CHECKING:
    from ddp_lab.checkpoints.saved import SavedCheckpoint


def find_source(
    runs_dir: Path, name: str | None, resume: str, restarted: str | None
) -> Path | None:
    """Return what a launch resumes from: a checkpoint, or its run's directory of checkpoints.

    None: it begins a new run.

    Args:
        runs_dir, name, resume: the config keys.
        restarted: the run directory that this launch used before torchrun restarted it, which then
            resumes its own checkpoints even with resume=never or a path; None: it has not been
            restarted.
    """
    used = name or restarted
    folder = runs_dir / used / "checkpoints" if used else None
    if folder and steps_in(folder) and (resume == "auto" or used == restarted):
        return folder
    return None if resume in ("auto", "never") else Path(resume)


def run_of(source: Path) -> Path:
    """Return the directory of the run to which a checkpoint, or a directory of them, belongs."""
    if source.is_dir() and not is_sharded(source):
        return source.parent
    return source.absolute().parent.parent


def open_checkpoint(path: Path, key: str = "resume=") -> "SavedCheckpoint":
    """Return a checkpoint whose hashes have been checked, as from `find_checkpoint`.

    Args:
        path: a file or a directory.
        key: what the user sets to the path, for messages.

    Raises:
        ConfigError: it is not a checkpoint of ddp_lab.
    """
    if not is_sharded(path):
        from ddp_lab.checkpoints.one_file import FullCheckpoint

        return FullCheckpoint(path, key)
    # torch.distributed.checkpoint loads 700 modules in 0.5 s
    from ddp_lab.checkpoints.sharded import ShardedCheckpoint

    return ShardedCheckpoint(path, key)


def result_in(folder: Path, criterion: Criterion | None) -> tuple[Path, Progress] | None:
    """Return the best checkpoint by a metric and the position in it.

    Return None if there is none: the last weights are the result.

    One that another metric has chosen, or the test set in older versions, is not the best by this
    one.
    """
    best = best_in(folder) if criterion else None
    # of shards only what is not a tensor is looked at
    if best is None or find_damage(best, slice(-1, None)):
        return None
    progress = Progress.of(open_checkpoint(best).state["progress"])
    return (best, progress) if progress.is_best(criterion) else None


def damage_of(path: Path, runtime: Runtime) -> str | None:
    """Return the same as `find_damage` on every rank.

    Collective: each rank reads some of the files.
    """
    own_damage = find_damage(path, slice(runtime.rank, None, runtime.world_size))
    return runtime.gather_and_decide(
        "damage",
        own_damage,
        lambda damages: "; ".join(dict.fromkeys(filter(None, damages))) or None,
    )


def find_checkpoint(
    folder: Path,
    choice: str,
    runtime: Runtime,
    criterion: Criterion | None = None,
    key: str = "resume=",
) -> Path | None:
    """Return the checkpoint to use. Collective, and the same on every rank.

    Args:
        folder: the directory of the run's checkpoints.
        choice: "last", the newest valid one, and newer ones that are damaged are logged; "best";
            "auto", the best one if `criterion` chose it, else the newest; or a path.
        criterion: the metric of the validation set that chooses; None: there is none.
        key: what the user sets to the choice, for messages.

    Returns:
        The path; None if there is no such checkpoint.

    Raises:
        ConfigError: there are such checkpoints, but none of them is valid, or an earlier version
            wrote it in a format that is not read any more.
    """
    if choice not in ("auto", "last", "best"):
        path = Path(choice)
        has_hashes = path.is_dir() or sums_of(path).exists()
        problem = damage_of(path, runtime) if has_hashes else None
        if problem:
            raise ConfigError(
                f"{key}{path}: the checkpoint is damaged: {problem}. Use another checkpoint"
            )
        return path

    def candidates() -> list[str]:
        with_best = choice == "best" or (
            choice == "auto" and result_in(folder, criterion) is not None
        )
        best = best_in(folder) if with_best else None
        newest = steps_in(folder) if choice != "best" else []
        return [str(path) for path in [best, *reversed(newest)] if path]

    bad: list[str] = []
    for candidate in runtime.broadcast_from_rank0("checkpoints", candidates):
        problem = damage_of(Path(candidate), runtime)
        if problem is None:
            for each in bad if runtime.is_main else []:
                log.warning(f"{each}; using {candidate}, the newest valid checkpoint")
            return Path(candidate)
        bad.append(f"{candidate} is damaged ({problem})")

    if bad:
        remedy = "use --checkpoint PATH"
        if key == "resume=":
            remedy = "choose another name to start a new run"
        raise ConfigError(
            f"{key}{choice}: none of the run's checkpoints is valid: {'; '.join(bad)}. Restore "
            f"one, or {remedy}"
        )
    return None
