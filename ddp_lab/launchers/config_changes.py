"""What a launch that resumes changes in the config of its run, and the configs of before.

config.yaml of a run directory is the config of the last launch that trained. If a launch changes
it, the config of before is kept as config.1.yaml, the next one as config.2.yaml. The first line has
the number of ranks, which is no key.
"""

import re
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ddp_lab.config.build import leaves
from ddp_lab.launchers.recorded_config import (
    CONFIG,
    RANKS,
    replace_durably,
    text_of,
    without_secrets,
)

# Keys that say where a run is, or what one launch does, and cannot change what is computed.
OF_A_LAUNCH = {"name", "runs_dir", "resume", "inject", "profile"}
NOT_SET = "not set"


def record_config(run_dir: Path, config: str, ranks: int, resumed: Path | None) -> list[str]:
    """Write config.yaml, keep that of before if it differs, and return what a resume changes.

    Only one process may call it at a time: rank 0 of the launch that has locked the run directory.
    If it is killed in between, the next launch finds one config.yaml or the other.

    Args:
        run_dir: the run directory.
        config: the config of this launch, as from `to_record`.
        ranks: number of ranks.
        resumed: the directory of the run that this launch resumes, most often the same; None: it
            begins a run.

    Returns:
        Lines for the log.
    """
    path = run_dir / CONFIG
    text = text_of(config, ranks)
    before = None if resumed is None else read_text(resumed / CONFIG)
    changed = [] if before is None else list_changes(before, text)
    recorded = read_text(path)
    backup = keep(path) if recorded is not None and list_changes(recorded, text) else None
    replace_durably(path, text)
    if not changed:
        return []
    where = backup or (resumed or run_dir) / CONFIG
    return [f"resumes with another config than before, which is in {where}:", *changed]


def read_text(path: Path) -> str | None:
    """Return the text of a config; None if there is none."""
    return path.read_text(errors="replace") if path.is_file() else None


def keep(path: Path) -> Path:
    """Keep a config.yaml as the next config.N.yaml, unless the newest one is the same.

    Returns:
        The path of the copy.
    """
    names = [file.name for file in path.parent.glob("config.*.yaml")]
    numbers = [re.fullmatch(r"config\.(\d+)\.yaml", name) for name in names]
    newest = max((int(number[1]) for number in numbers if number), default=0)
    text = path.read_text(errors="replace")
    last = path.with_name(f"config.{newest}.yaml")
    if read_text(last) == text:  # a launch was killed before it wrote its own
        return last
    backup = path.with_name(f"config.{newest + 1}.yaml")
    replace_durably(backup, text)
    return backup


def list_changes(before: str, now: str) -> list[str]:
    """Return a line for each key that differs between two recorded configs, without secrets.

    There is none if the first config is damaged.
    """
    try:
        old = values_of(before)
        new = values_of(now)
    except (YAMLError, OmegaConfBaseException, ValueError):
        return []
    return [
        f"{key}: {shown(old.get(key, NOT_SET))} -> {shown(new.get(key, NOT_SET))}"
        for key in old | new
        if old.get(key, NOT_SET) != new.get(key, NOT_SET)
    ]


def values_of(text: str) -> dict[str, Any]:
    """Return the values of a recorded config by dotted key. A reference to another key stays one.

    Raises:
        ValueError: it is no config.
    """
    config = OmegaConf.create(text)
    if not isinstance(config, DictConfig) or not config:
        raise ValueError("not a config")
    values = without_secrets(cast("dict[str, Any]", OmegaConf.to_container(config)))
    ranks = re.match(rf"# {RANKS}: (\d+)\n", text)
    recorded = {RANKS: int(ranks[1])} if ranks else {}
    compared = {key: value for key, value in values.items() if key not in OF_A_LAUNCH}
    return recorded | dict(leaves(compared))


def shown(value: Any) -> str:
    """Return a value as YAML writes it on the command line."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown, cast('list[Any]', value)))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
