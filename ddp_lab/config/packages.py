"""Packages that only some options need, and what to install where one is missing.

They are imported by name: the type checker would read all of transformers, half a minute of a core.
"""

import importlib
from typing import Any

from ddp_lab.config.errors import ConfigError


def import_package(name: str, extra: str, key: str) -> Any:
    """Import a package.

    Args:
        name: of the package.
        extra: of ddp_lab, which installs it.
        key: the start of the message, for example "model=timm".

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # a package that it needs itself
            raise
        raise ConfigError(
            f"{key}: needs the package {name}; pip install 'ddp_lab[{extra}]'"
        ) from None
