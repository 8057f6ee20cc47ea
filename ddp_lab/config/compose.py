"""The config of Hydra overrides, composed from conf/ and the user's own yaml."""

import re
from pathlib import Path

from hydra import compose as compose_by_hydra
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

# In a clone a link to conf/ at the top level, in a wheel the files.
CONF = Path(__file__).parents[1] / "conf"


def compose(
    overrides: list[str], config_dir: str | None = None, with_choices: bool = False
) -> DictConfig:
    """Return the config of overrides, which are not checked first.

    Args:
        overrides: Hydra overrides.
        config_dir: The directory of the user's own yaml, if there is one.
        with_choices: Whether the key `hydra` is kept, of which `runtime.choices` has the chosen
            option of each group.

    Raises:
        HydraException: An override is not in Hydra's grammar, or does not fit the config.
    """
    search: list[str] = []
    if config_dir is not None:
        folder = quote(f"file://{Path(config_dir).resolve()}")
        search.append(f"hydra.searchpath=[{folder}]")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        all_overrides = [*search, *overrides]
        return compose_by_hydra("config", overrides=all_overrides, return_hydra_config=with_choices)


def quote(value: str, mark: str = "'") -> str:
    """Quote a value for Hydra's grammar, in which commas and equal signs are special.

    Backslashes are special before a quote only.

    Args:
        value: The value.
        mark: The kind of quotes, ' or ".
    """

    def escape(match: re.Match[str]) -> str:
        backslashes, end = match.groups()
        return 2 * backslashes + end.replace(mark, f"\\{mark}")

    escaped = re.sub(rf"(\\*)({mark}|\Z)", escape, value)
    return f"{mark}{escaped}{mark}"
