"""Which run a command is about: its name in runs_dir, or the path of its directory."""

import difflib
from pathlib import Path

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.recorded_config import CONFIG
from ddp_lab.resilience.run_directory import LAUNCH_FILE

RUNS = Path("runs")  # the default of runs_dir


def run_directory(text: str, runs_dir: Path = RUNS) -> Path:
    """Return the directory of a run; `text` as a path if there is no such run.

    Args:
        text: Of the command line: a path or, if no run is there, a name.
        runs_dir: In which names are looked up.
    """
    path = Path(text)
    return next((each for each in (path, runs_dir / path) if is_run(each)), path)


def existing_run(text: str, runs_dir: Path = RUNS) -> Path:
    """Return the directory of a run. Arguments as of `run_directory`.

    Raises:
        ConfigError: there is no such run.
    """
    path = run_directory(text, runs_dir)
    if not is_run(path):
        raise refuse_unknown(text, runs_dir)
    return path


def is_run(folder: Path) -> bool:
    """Return whether a directory is that of a run, which may have ended before its first step."""
    return (folder / CONFIG).is_file() or (folder / LAUNCH_FILE).is_file()


def refuse_unknown(text: str, runs_dir: Path = RUNS) -> ConfigError:
    """Return the error for a run that does not exist. Arguments as of `run_directory`."""
    files = [file for depth in ("*", "*/*") for file in runs_dir.glob(f"{depth}/{LAUNCH_FILE}")]
    names = [str(file.parent.relative_to(runs_dir)) for file in files]
    close = "".join(f" Did you mean {name}?" for name in difflib.get_close_matches(text, names, 1))
    return ConfigError(
        f"{text}: there is no such run: it is neither the directory of a run nor the name of one "
        f"in {runs_dir}.{close} `ddp-lab runs` lists the names"
    )
