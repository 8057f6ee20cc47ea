"""One directory for a run: the same for every rank of every node, and for every restart."""

from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig

from ddp_lab.errors import ConfigError
from ddp_lab.runtime import Runtime, is_restart, launch_id

LAUNCH_FILE = ".launch"  # holds the launch's id, by which a restart finds its directory again


def open_run_dir(cfg: DictConfig, runtime: Runtime, label: str) -> Path:
    """Returns `runs_dir`/`name`, created. Without a name rank 0 makes one of `label` and the time, unused so far.

    Raises:
        ConfigError: the directory cannot be made, or resume=never would write over a run.
    """
    root = Path(cfg.runs_dir)

    def decide() -> str:
        try:
            root.mkdir(parents=True, exist_ok=True)
            if cfg.name is None:
                return (find_launch(root) if is_restart() else None) or make_unused(root, label)
            (root / cfg.name).mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"runs_dir={root}: cannot make the run directory there ({error.strerror})") from None
        if cfg.resume == "never" and not is_restart() and (root / cfg.name / "config.yaml").exists():
            raise ConfigError(
                f"resume=never: {root / cfg.name} already holds a run. Choose another name, remove that directory, "
                "or go on with it by resume=auto"
            )
        return cfg.name

    run_dir = root / runtime.agree("run_name", decide)
    run_dir.mkdir(parents=True, exist_ok=True)  # on a node that does not share rank 0's disk
    return run_dir


def find_launch(root: Path) -> str | None:
    files = sorted(root.glob(f"*/{LAUNCH_FILE}"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((file.parent.name for file in files if file.read_text() == launch_id()), None)


def make_unused(root: Path, label: str) -> str:
    base, attempt = f"{label}-{datetime.now():%Y%m%d-%H%M%S}", 1
    while True:
        name = base if attempt == 1 else f"{base}-{attempt}"
        try:
            (root / name).mkdir()
        except FileExistsError:
            attempt += 1
            continue
        (root / name / LAUNCH_FILE).write_text(launch_id())
        return name
